"""How does a registered model predict? Raw rows are prepared as in training, then the framework's model predicts.

The model is rebuilt from source text, JSON and the framework's files; nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from torch import Tensor

from penstock.errors import DataError
from penstock.ingest.columns.arrays import column_view, contiguous, numpy_arrays
from penstock.ingest.feed.gather import RowGather
from penstock.ingest.feed.lists import cut_lists
from penstock.ingest.schema import FeedSchema
from penstock.messages import counted
from penstock.storage import Storage
from penstock.training.evaluation.metrics import label_kind, prepare_predictions
from penstock.training.model import ClassScores, ModelSpec, load_model, missing_part, read_spec
from penstock.training.registry.given_rows import GivenRows, given_rows, raw_table
from penstock.training.registry.raw_rows import PreparedRows, RawForm, RawRows

__all__ = ["MODEL_FILE", "LoadedModel", "answer_table", "form_of"]

MODEL_FILE = "model.json"
"""In a model's folder, beside the framework's files: a `ModelSpec`."""

SHOWN_PROBLEMS = 10

BATCH_BYTES = 8 << 20
"""Bytes of features in a call where many rows are scored, within `MOST_BATCH_ROWS`."""

MOST_BATCH_ROWS = 8192
"""Enough to spread the fixed cost of a call; more would only take memory."""

Batches = Callable[[int, int], dict[str, Any]]
"""(first row, end) -> tensors as the feed delivers them, on the CPU."""


class LoadedModel:
    """A trained model and the preparation of its rows.

    Args:
        folder: of the model's files, with `model.json`.

    Attributes:
        schema: what the model itself takes.
        inputs: columns and types of raw rows.
        unneeded: those of `inputs` that need not be given.
        form: how raw rows are prepared.

    Raises:
        DataError: the model has no description of raw rows.
        UserCodeError: the user's code cannot be loaded.
        CheckpointError: the files do not fit the model.
        PreflightError, SpecError: a package that the model needs is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        spec = read_spec(Path(folder) / MODEL_FILE)
        self.schema: FeedSchema = spec.feed_schema
        self._model = load_model(spec, Storage(str(folder)))
        self._batch_rows = spec.batch_rows
        self.form: RawForm = form_of(spec)
        self._raw = RawRows(self.form, spec.feed_schema)
        self.inputs: pa.Schema = self._raw.schema
        self.unneeded: tuple[str, ...] = self.form.unneeded

    @property
    def rows_at_once(self) -> int:
        """Number of raw rows that are prepared together: a good batch for `score`."""
        return self._raw.rows_at_once

    @property
    def can_predict(self) -> bool:
        """Whether what was trained can predict."""
        return self._model.can_predict

    @property
    def predicts_by(self) -> str:
        """The part of the user's code that predicts."""
        return missing_part(self._model)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, in the order of `probabilities`."""
        return self.schema.classes

    def labels(self, rows: pa.Table) -> np.ndarray:
        """Return the labels of raw rows: see `RawRows.labels`.

        Raises:
            DataError: the rows do not fit.
        """
        return self._raw.labels(rows)

    def predict(self, rows: Any, *, on_error: Literal["raise", "report"] = "raise") -> pd.DataFrame:
        """Predict. The answer to a row does not depend on the other rows.

        The model gets as many rows at a time as in `evaluate`. With the same rows in the same order, as many threads
        (torch.set_num_threads) and the same hardware, predictions equal those of `evaluate` to the bit.

        Args:
            rows: raw rows, as the source has them: a DataFrame, an Arrow table, a dict of columns, or a list of dicts. Values
                in the label's column are not read.
            on_error: `report` answers every row, with a column `error` that is None for a row that was predicted.

        Returns:
            A row for each given row. For classes `prediction` (the class's name, or its index where classes have no names),
            `probability` (of that class) and `probabilities` (a list per row); else `prediction`.

        Raises:
            DataError: rows cannot be used; names row, column, value and rule.
        """
        if on_error not in ("raise", "report"):
            raise DataError(f"on_error is {on_error!r}", next_step="set it to raise or report")
        given = given_rows(rows)
        features, scored, problems, _ = self._features(given)
        if problems and on_error == "raise":
            raise _refusal(problems, given.num_rows)
        answer = self._answer(features, self._batch_rows)
        names = ["prediction", *(["probability", "probabilities"] if label_kind(self.schema) == "classification" else [])]
        table = pd.DataFrame({name: _cells(answer.column(name)) if answer.num_columns else [] for name in names}, index=scored)
        if on_error == "report":
            # Nullable integers: others would become floats if a row failed.
            whole = {name: "Int64" for name in table.columns if pd.api.types.is_integer_dtype(table[name].dtype)}
            table = table.astype(whole).reindex(range(given.num_rows))
            table["error"] = pd.Series([problems.get(row) for row in range(given.num_rows)], dtype=object)
        return table

    def score(self, rows: pa.Table) -> PreparedRows:
        """Predict many raw rows, as `predict` does with `on_error="report"`, but from Arrow to Arrow.

        The model gets more rows at a time, by their bytes: predictions may round differently in the last bits.

        Returns:
            `table` has `prediction` and, for classes, `probability` and `probabilities`; no columns where no row was scored.

        Raises:
            DataError: a column is missing, or the model cannot predict.
        """
        features, scored, problems, unseen = self._features(given_rows(rows))
        return PreparedRows(self._answer(features, self._many_rows(features)), scored, problems, unseen)

    def _features(self, given: GivenRows) -> PreparedRows:
        """Prepare the features of the rows that can be used."""
        table, problems = raw_table(given, self.inputs, self.unneeded)
        ready = self._raw.prepare(table)
        problems = {**ready.problems, **problems}
        if not problems:
            return ready
        chosen = np.array([row not in problems for row in ready.rows.tolist()], np.bool_)
        table = ready.table.filter(pa.array(chosen)) if chosen.any() else pa.table({})
        return PreparedRows(table, ready.rows[chosen], problems, ready.unseen)

    def _many_rows(self, features: pa.Table) -> int:
        """Number of rows to predict at once where there are many; rows with encoded images grow, so they keep to the least."""
        if not features.num_rows or any(info.encoded for info in self.schema.features):
            return self._batch_rows
        row_bytes = max(1, int(features.nbytes) // int(features.num_rows))
        return max(self._batch_rows, min(MOST_BATCH_ROWS, BATCH_BYTES // row_bytes))

    def _answer(self, features: pa.Table, batch_rows: int) -> pa.Table:
        """Predict prepared rows in batches; without columns for no rows."""
        if not self._model.can_predict:
            raise DataError(f"the model cannot predict without {self.predicts_by}", next_step="add it, and train again")
        parts, batches, num_rows = [], _batches_of(features, self.schema), features.num_rows
        with torch.inference_mode():
            for begin in range(0, num_rows, batch_rows):
                end = min(begin + batch_rows, num_rows)
                given = batches(begin, end)
                on_device: Any = {
                    name: values.to(self._model.device) if isinstance(values, Tensor) else values
                    for name, values in given.items()
                }
                parts.append(self._model.predict(on_device, end - begin).detach().cpu())
        return answer_table(torch.cat(parts), self.schema, self._model.predicts) if parts else pa.table({})


def form_of(spec: ModelSpec) -> RawForm:
    """Read how a registered model prepares raw rows. Raises DataError if it has no such description."""
    if spec.raw is None:
        raise DataError("the model has no description of raw rows", next_step="train and register it again")
    return RawForm.model_validate(spec.raw)


def _batches_of(table: pa.Table, schema: FeedSchema) -> Batches:
    """Batches of prepared rows, by the code that gathers those of a dataset."""
    block = {name: column_view(contiguous(table.column(name))) for name in table.column_names}
    rows = RowGather(schema.features, [table.num_rows], lambda _: block)

    def batch(begin: int, end: int) -> dict[str, Any]:
        ids = np.arange(begin, end)
        tensors: dict[str, Any] = {**rows.take(ids), **numpy_arrays(rows.take_arrow(ids))}
        for info, packed in rows.take_lists(ids):
            tensors |= cut_lists(info, packed, [end - begin])[0]
        return tensors

    return batch


def _refusal(problems: Mapping[int, str], num_rows: int) -> DataError:
    lines = [problems[row] for row in sorted(problems)]
    advice = 'correct them in the rows given, or have rows reported one by one: on_error="report"'
    if len(lines) == 1:
        return DataError(lines[0], next_step=advice)
    shown = lines[:SHOWN_PROBLEMS] + ([f"and {len(lines) - SHOWN_PROBLEMS} more"] if len(lines) > SHOWN_PROBLEMS else [])
    return DataError(f"{len(lines)} of {counted(num_rows, 'row')} cannot be scored", problems=shown, next_step=advice)


def answer_table(output: Tensor, schema: FeedSchema, predicts: ClassScores) -> pa.Table:
    """Convert the result of a model's `predict`, rows first, to a table.

    Returns:
        For classes `prediction` (string, the class's name, or int64, its index if classes have no names; null if the model
        gives NaN), `probability` of that class and `probabilities` (lists, as all of double); else `prediction`: a number, or
        without a label (or with one of lists) lists of the result's shape. Of a result [rows, n, numbers] those of `n` that
        are all NaN are left out.
    """
    kind = label_kind(schema)
    if kind != "classification":
        values = prepare_predictions(output, schema, predicts) if kind == "regression" else output
        exact = not values.is_floating_point() or values.dtype == torch.float64
        numbers = (values if exact else values.float()).numpy()
        there = ~np.isnan(numbers).all(axis=2) if numbers.ndim == 3 else np.ones(0, np.bool_)
        if there.all():
            return pa.table({"prediction": _nested(numbers)})
        offsets = np.cumsum([0, *there.sum(axis=1)], dtype=np.int32)
        return pa.table({"prediction": pa.ListArray.from_arrays(pa.array(offsets), _nested(numbers[there]))})
    probabilities = prepare_predictions(output, schema, predicts)
    chosen = pa.array(probabilities.argmax(dim=1).numpy(), mask=probabilities.isnan().any(dim=1).numpy())
    return pa.table(
        {
            "prediction": chosen if schema.classes is None else pa.array(schema.classes, pa.string()).take(chosen),
            "probability": probabilities.max(dim=1).values.double().numpy(),
            "probabilities": _nested(probabilities.double().numpy()),
        }
    )


def _nested(values: np.ndarray) -> pa.Array:
    made = pa.array(np.ascontiguousarray(values).reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        lists = int(np.prod(values.shape[:axis]))
        made = pa.ListArray.from_arrays(pa.array(np.arange(lists + 1, dtype=np.int32) * values.shape[axis]), made)
    return made


def _cells(column: pa.ChunkedArray) -> Any:
    """Return the cells of a DataFrame's column: text and lists as Python has them."""
    if pa.types.is_integer(column.type) and column.null_count:
        return pd.array(column.to_pylist(), "Int64")  # not floats in all rows
    plain = pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)
    return column.to_numpy() if plain else column.to_pylist()
