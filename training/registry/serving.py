"""How does a registered model answer? The framework's loader rebuilds it from source text and files; nothing is unpickled.

MLflow imports this module when it loads the model ("models from code"), from the copy of our packages that lies in the model
itself. So an environment with the listed requirements is enough; penstock need not be installed there. A package that adds a
framework must be, and is listed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from mlflow.pyfunc import PythonModel, PythonModelContext

from penstock.errors import DataError
from penstock.ingest.feed.lists import from_padded
from penstock.ingest.schema import ColumnInfo
from penstock.storage import Storage
from penstock.training.evaluation.metrics import label_kind, prepare_predictions
from penstock.training.model import ModelSpec, load_model

__all__ = ["PREDICT_ROWS", "ServedModel"]


PREDICT_ROWS = 1024
"""Rows given to the model at once; more come out the same, in several passes."""


class ServedModel(PythonModel):  # type: ignore[misc]
    """Predicts from prepared feature columns, as the dataset's feed holds them."""

    def load_context(self, context: PythonModelContext) -> None:
        """Rebuild the model from the artifact `spec`, `model.json`, and the files beside it.

        Raises:
            CheckpointError: the files do not fit the model.
        """
        file = Path(context.artifacts["spec"])
        spec = ModelSpec.model_validate_json(file.read_bytes())
        self._schema = spec.feed_schema
        self._model = load_model(spec, Storage(str(file.parent)))

    @property
    def can_predict(self) -> bool:
        """Whether what was trained can predict."""
        return self._model.can_predict

    def predict(
        self, context: PythonModelContext | None, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> Any:
        """Predict, row by row. MLflow knows no type for "a DataFrame or a mapping of arrays" and complains about others.

        Args:
            context: not used.
            model_input: feature columns, rows first: a mapping of name to array, or a DataFrame whose cells are scalars or
                (flat) lists. A column of lists of unequal length is an array [rows, longest] and `<name>_length`, int64
                [rows].
            params: not used.

        Returns:
            For a classification a DataFrame of `prediction` (the class's name, or its index), `probability` (of that class)
            and `probabilities` (a list per row); else an array of what the model's `predict` returned.

        Raises:
            DataError: a feature is missing or of the wrong shape.
        """
        batch: dict[str, torch.Tensor] = {}
        for column in self._schema.features:
            batch |= self._lists(column, model_input) if column.ragged else {column.name: self._tensor(column, model_input)}
        counts = {name: len(values) for name, values in batch.items()}
        if len(set(counts.values())) > 1:
            raise DataError(f"the columns differ in their number of rows: {counts}")
        rows = next(iter(counts.values()))
        parts = []
        with torch.inference_mode():
            for start in range(0, max(rows, 1), PREDICT_ROWS):
                part = {name: values[start : start + PREDICT_ROWS] for name, values in batch.items()}
                count = len(next(iter(part.values())))
                for column in self._schema.features:
                    if column.ragged:
                        part |= from_padded(column, part.pop(column.name), part.pop(f"{column.name}_length"))
                on_device = {name: values.to(self._model.device) for name, values in part.items()}
                parts.append(self._model.predict(on_device, count).detach().cpu())
        output = torch.cat(parts)
        if label_kind(self._schema) != "classification":
            return output.float().numpy() if output.is_floating_point() else output.numpy()
        return self._table(prepare_predictions(output, self._schema, self._model.predicts))

    def _table(self, probabilities: torch.Tensor) -> pd.DataFrame:
        best = probabilities.argmax(dim=1)
        names = self._schema.classes
        return pd.DataFrame(
            {
                "prediction": best.tolist() if names is None else [names[index] for index in best.tolist()],
                "probability": probabilities.max(dim=1).values.double().tolist(),
                "probabilities": probabilities.double().tolist(),
            }
        )

    def _lists(self, column: ColumnInfo, model_input: Any) -> dict[str, torch.Tensor]:
        length = f"{column.name}_length"
        values, lengths = _column(model_input, column.name), np.asarray(_column(model_input, length), np.int64)
        try:
            padded = np.asarray(list(values)) if len(values) else np.zeros((0, 0), column.dtype)
        except ValueError as error:
            raise DataError(f"column {column.name!r} is no array [rows, longest] of {column.dtype}: {error}") from error
        if padded.ndim != 2 or lengths.shape != padded.shape[:1] or (lengths < 0).any() or (lengths > padded.shape[1]).any():
            raise DataError(
                f"column {column.name!r} has shape {padded.shape} and lengths of shape {lengths.shape}; the model takes "
                f"(rows, longest) and, in {length!r}, for each row from 0 to longest"
            )
        padded[np.arange(padded.shape[1]) >= lengths[:, None]] = 0  # whatever is there, it counts for nothing
        return {column.name: torch.from_numpy(_cast(column, padded)), length: torch.from_numpy(lengths)}

    def _tensor(self, column: ColumnInfo, model_input: Any) -> torch.Tensor:
        values = _column(model_input, column.name)
        if isinstance(values, pd.Series) and column.shape:
            values = [np.asarray(value) for value in values]
        array = _cast(column, np.asarray(values))
        if array.ndim == 2 and column.shape and array.shape[1] == math.prod(column.shape):
            array = array.reshape(-1, *column.shape)
        if array.shape[1:] != tuple(column.shape):
            wanted = ", ".join(map(str, ("rows", *column.shape)))
            raise DataError(f"column {column.name!r} has shape {array.shape}; the model takes ({wanted})")
        return torch.from_numpy(np.ascontiguousarray(array))


def _cast(column: ColumnInfo, given: np.ndarray) -> np.ndarray:
    """The values in the column's dtype; refuses those that would become others, except by rounding to a float."""
    try:
        with np.errstate(invalid="ignore"):  # the comparison tells
            cast = given.astype(column.dtype, copy=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"column {column.name!r} is no array of {column.dtype}: {error}") from error
    changed = cast != given if np.issubdtype(cast.dtype, np.integer) else np.zeros(0, bool)
    if np.any(changed):
        example = given[changed][0]
        raise DataError(f"column {column.name!r} holds {example}; the model takes {column.dtype}, which cannot hold it")
    return cast


def _column(model_input: Any, name: str) -> Any:
    given = list(model_input.columns if isinstance(model_input, pd.DataFrame) else model_input)
    if name not in given:
        raise DataError(f"the input has no column {name!r}; it has {given}")
    return model_input[name]
