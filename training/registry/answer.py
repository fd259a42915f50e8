"""What does a model answer? One row for each given one: labels by name, probabilities or values, and the columns asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from penstock.errors import DataError
from penstock.ingest.schema import FeedSchema
from penstock.messages import capped, did_you_mean
from penstock.training.evaluation.metrics import label_kind, prepare_predictions
from penstock.training.model import ClassScores

__all__ = ["ERROR", "answer_arrays", "answer_columns", "answer_table", "arrow_answer", "asked_for", "prediction_columns"]


ERROR = "error"
"""The column with the reason why a row has no answer, where that is reported."""


def prediction_columns(schema: FeedSchema) -> tuple[str, ...]:
    """Columns of an answer, without `error`."""
    return ("prediction", "probability", "probabilities") if label_kind(schema) == "classification" else ("prediction",)


def answer_arrays(output: torch.Tensor, schema: FeedSchema, predicts: ClassScores) -> dict[str, np.ndarray]:
    """What a model's `predict` returned, as arrays with rows first.

    Returns:
        For classes `prediction` (int64, the class's index), `probability` (float64, of that class) and `probabilities`
        (float64 [rows, classes]); else `prediction`: a number, or without a label an array [rows, *shape].
    """
    kind = label_kind(schema)
    if kind != "classification":
        values = prepare_predictions(output, schema, predicts) if kind == "regression" else output
        return {"prediction": (values.float() if values.is_floating_point() else values).numpy()}
    probabilities = prepare_predictions(output, schema, predicts)
    return {
        "prediction": probabilities.argmax(dim=1).numpy(),
        "probability": probabilities.max(dim=1).values.double().numpy(),
        "probabilities": probabilities.double().numpy(),
    }


def answer_columns(arrays: Mapping[str, np.ndarray], schema: FeedSchema) -> dict[str, Any]:
    """The arrays as columns of a DataFrame: a class by its name where it has one, `probabilities` as a list per row."""
    columns: dict[str, Any] = dict(arrays)
    if "probabilities" in columns:
        columns["probabilities"] = arrays["probabilities"].tolist()
    if schema.classes is not None and "probability" in columns:
        columns["prediction"] = [schema.classes[index] for index in arrays["prediction"].tolist()]
    return columns


def arrow_answer(arrays: Mapping[str, np.ndarray], schema: FeedSchema) -> pa.Table:
    """The arrays as an Arrow table: a class by its name where it has one, arrays of several axes as lists."""
    columns = {name: _nested(values) for name, values in arrays.items()}
    if schema.classes is not None and "probability" in columns:
        columns["prediction"] = pa.array(schema.classes, pa.string()).take(columns["prediction"])
    return pa.table(columns)


def _nested(values: np.ndarray) -> pa.Array:
    made = pa.array(np.ascontiguousarray(values).reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        lists = int(np.prod(values.shape[:axis]))
        made = pa.ListArray.from_arrays(pa.array(np.arange(lists + 1, dtype=np.int32) * values.shape[axis]), made)
    return made


def answer_table(
    answered: Mapping[str, Any], rows: np.ndarray, num_rows: int, problems: Mapping[int, str], *, report: bool
) -> pd.DataFrame:
    """The answer to all rows, in the order they were given.

    Args:
        answered: columns of the rows that were scored; arrays of more than one axis become cells.
        rows: int64, which of the given rows those are.
        problems: by row, why the others were not.
        report: whether there is a column `error`.
    """
    cells = {
        name: list(values) if isinstance(values, np.ndarray) and values.ndim > 1 else values
        for name, values in answered.items()
    }
    table = pd.DataFrame(cells, index=rows)
    if report:
        # By one type whether a row failed or not; integers would else become floats.
        whole = {name: "Int64" for name in table.columns if pd.api.types.is_integer_dtype(table[name].dtype)}
        table = table.astype(whole).reindex(range(num_rows))
        table[ERROR] = pd.Series([problems.get(row) for row in range(num_rows)], dtype=object)
    return table


def asked_for(
    table: pd.DataFrame, columns: Sequence[str] | None, given: Sequence[str], values_of: Callable[[str], Any]
) -> pd.DataFrame:
    """The columns asked for in their order; those of the answer, else those given.

    Raises:
        DataError: there is no such column, or `columns` is one name and not a list.
    """
    if columns is None:
        return table
    if isinstance(columns, str):
        raise DataError(f"columns is {columns!r}, which is not a list of names", next_step=f"give columns=[{columns!r}]")
    found = {}
    for name in columns:
        if name in table.columns:
            found[name] = table[name]
        elif name in given:
            found[name] = values_of(name)
        else:
            known = [*table.columns, *given]
            raise DataError(
                f"columns: there is no column {name!r}{did_you_mean(name, known)}",
                next_step=f"choose from {', '.join(capped(known))}",
            )
    return pd.DataFrame(found, index=table.index)
