"""How does a registered model answer? Raw rows are prepared as in training, then the framework's model predicts.

The model is rebuilt from source text, JSON and the framework's files; nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from torch import Tensor

from penstock.errors import DataError
from penstock.ingest.columns.arrays import column_view, contiguous
from penstock.ingest.feed.gather import RowGather
from penstock.ingest.feed.lists import cut_lists
from penstock.ingest.schema import FeedSchema
from penstock.messages import counted
from penstock.storage import Storage
from penstock.training.model import ModelSpec, load_model
from penstock.training.registry.answer import (
    answer_arrays,
    answer_columns,
    answer_table,
    arrow_answer,
    asked_for,
    prediction_columns,
)
from penstock.training.registry.given_rows import GivenRows, given_rows, raw_table
from penstock.training.registry.prepared_rows import PreparedColumns
from penstock.training.registry.raw_rows import PreparedRows, RawForm, RawRows

__all__ = ["MODEL_FILE", "LoadedModel", "ScoredRows"]


MODEL_FILE = "model.json"
"""In a model's folder, beside the framework's files: a `ModelSpec`."""

SHOWN_PROBLEMS = 10

BATCH_BYTES = 8 << 20
"""Features of about so many bytes are predicted at once where many rows are scored, within `MOST_BATCH_ROWS`."""

MOST_BATCH_ROWS = 8192
"""What a call of a model costs besides its rows is spread over enough of them here; more would take memory for nothing."""

Batches = Callable[[int, int], dict[str, Tensor]]
"""(first row, end) -> tensors as the feed delivers them, on the CPU."""


class ScoredRows(NamedTuple):
    """Rows that were scored, and what is wrong with the others."""

    answer: pa.Table
    """`prediction` and, for classes, `probability` and `probabilities`; without columns where no row was scored."""
    rows: np.ndarray
    """int64: which of the given rows it answers, ascending."""
    problems: dict[int, str]
    """By given row, of all others."""
    unseen: Mapping[str, int]
    """Column -> its values that a transform took though the train split has no such category."""


class LoadedModel:
    """A trained model with what prepares its rows.

    Args:
        folder: of the model's files, with `model.json`.

    Attributes:
        schema: what the model itself takes.
        inputs: columns and types of raw rows; None for a model that was registered without them.
        unneeded: those of `inputs` that need not be given.

    Raises:
        UserCodeError: the user's code cannot be loaded.
        CheckpointError: the files do not fit the model.
        PreflightError, SpecError: a package that the model needs is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        spec = ModelSpec.model_validate_json((Path(folder) / MODEL_FILE).read_bytes())
        self.schema: FeedSchema = spec.feed_schema
        self._model = load_model(spec, Storage(str(folder)))
        self._batch_rows = spec.batch_rows
        self._raw = None if spec.raw is None else RawRows(RawForm.model_validate(spec.raw), spec.feed_schema)
        self.inputs: pa.Schema | None = None if self._raw is None else self._raw.schema
        self.unneeded: tuple[str, ...] = () if self._raw is None else self._raw.form.unneeded

    @property
    def form(self) -> RawForm | None:
        """How raw rows are prepared; None for a model that was registered without it."""
        return None if self._raw is None else self._raw.form

    @property
    def rows_at_once(self) -> int:
        """How many raw rows are prepared together: a good number to give to `score`."""
        return self._batch_rows if self._raw is None else self._raw.rows_at_once

    @property
    def can_predict(self) -> bool:
        """Whether what was trained can predict."""
        return self._model.can_predict

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, in the order of `probabilities`."""
        return self.schema.classes

    def labels(self, rows: pa.Table) -> np.ndarray:
        """What the model should have answered to raw rows that hold their label: see `RawRows.labels`.

        Raises:
            DataError: the model was registered without what prepares raw rows, or the rows do not fit.
        """
        if self._raw is None:
            raise DataError("the model was registered without what prepares raw rows", next_step="register it again")
        return self._raw.labels(rows)

    def predict(
        self,
        rows: Any,
        *,
        columns: Sequence[str] | None = None,
        on_error: Literal["raise", "report"] = "raise",
        prepared: bool = False,
    ) -> pd.DataFrame:
        """Predict, row by row. What is answered to a row does not depend on the others.

        The model gets as many rows at a time as where it was evaluated. With as many threads (torch.set_num_threads) and on
        the same hardware its predictions then equal those of `evaluate` to the bit, if the same rows come in the same order.

        Args:
            rows: raw rows, as the source has them: a DataFrame, an Arrow table, a dict of columns, a list of dicts, a dict of
                one row, or JSON text of the last three. Whatever stands in the label's column is not looked at.
            columns: which columns to answer with: those of the answer, and columns of `rows`. All of the answer's by default.
            on_error: `report` answers every row, with a column `error` that is None where all went well.
            prepared: `rows` holds the features as the dataset's feed has them, a dict of arrays or a DataFrame.

        Returns:
            A row for each given row. For classes `prediction` (the class's name, or its index where classes have no names),
            `probability` (of that class) and `probabilities` (a list per row); else `prediction`.

        Raises:
            DataError: rows cannot be used; says which row, column and value, and why.
        """
        if on_error not in ("raise", "report"):
            raise DataError(f"on_error is {on_error!r}", next_step="set it to raise or report")
        if prepared or self._raw is None:
            made = PreparedColumns(rows, self.schema)
            scored = np.arange(made.num_rows)
            table = answer_table(
                self._answer(made.batch, made.num_rows), scored, made.num_rows, {}, report=on_error == "report"
            )
            names = [str(name) for name in (rows.columns if isinstance(rows, pd.DataFrame) else rows)]
            return asked_for(table, columns, names, lambda name: list(rows[name]))
        given = given_rows(rows, self._raw.schema)
        features, scored, problems, _ = self._features(self._raw, given)
        if problems and on_error == "raise":
            raise _refusal(problems, given.num_rows)
        answered = self._answer(_batches_of(features, self.schema), len(scored))
        table = answer_table(answered, scored, given.num_rows, problems, report=on_error == "report")
        return asked_for(table, columns, list(given.columns), lambda name: given.of(name, np.arange(given.num_rows)))

    def score(self, rows: pa.Table) -> ScoredRows:
        """Predict many raw rows, as `predict` does with `on_error="report"`, but from Arrow to Arrow.

        The model gets more rows at a time, by their bytes: predictions may round differently in the last bits.

        Raises:
            DataError: a column is missing, the model cannot predict, or it was registered without what prepares raw rows.
        """
        if self._raw is None:
            raise DataError(
                "the model takes prepared rows only: it was registered without what prepares raw ones",
                next_step="train and register it again with this version of penstock",
            )
        given = given_rows(rows, self._raw.schema)
        features, scored, problems, unseen = self._features(self._raw, given, counting=True)
        arrays = self._arrays(_batches_of(features, self.schema), len(scored), self._many_rows(features))
        return ScoredRows(pa.table({}) if arrays is None else arrow_answer(arrays, self.schema), scored, problems, unseen)

    def _features(self, raw: RawRows, given: GivenRows, *, counting: bool = False) -> PreparedRows:
        """Prepared features of the rows that can be used."""
        table, problems = raw_table(given, raw.schema, self.unneeded)
        ready = raw.prepare(table, counting=counting)
        problems = {**ready.problems, **problems}
        if not problems:
            return ready
        chosen = np.array([row not in problems for row in ready.rows.tolist()], np.bool_)
        table = ready.table.filter(pa.array(chosen)) if chosen.any() else pa.table({})
        return PreparedRows(table, ready.rows[chosen], problems, ready.unseen)

    def _many_rows(self, features: pa.Table) -> int:
        """How many rows are predicted at once where there are many; those that hold images still encoded grow."""
        if not features.num_rows or any(info.encoded for info in self.schema.features):
            return self._batch_rows
        row_bytes = max(1, int(features.nbytes) // int(features.num_rows))
        return max(self._batch_rows, min(MOST_BATCH_ROWS, BATCH_BYTES // row_bytes))

    def _answer(self, batches: Batches, num_rows: int) -> Mapping[str, Any]:
        arrays = self._arrays(batches, num_rows, self._batch_rows)
        if arrays is None:
            return {name: [] for name in prediction_columns(self.schema)}
        return answer_columns(arrays, self.schema)

    def _arrays(self, batches: Batches, num_rows: int, batch_rows: int) -> dict[str, np.ndarray] | None:
        """What the model says of each row; None of no rows."""
        if not self._model.can_predict:
            raise DataError("the model cannot predict: its recipe has no `predict`", next_step="add one, and train")
        parts = []
        with torch.inference_mode():
            for begin in range(0, num_rows, batch_rows):
                end = min(begin + batch_rows, num_rows)
                on_device = {name: values.to(self._model.device) for name, values in batches(begin, end).items()}
                parts.append(self._model.predict(on_device, end - begin).detach().cpu())
        return answer_arrays(torch.cat(parts), self.schema, self._model.predicts) if parts else None


def _batches_of(table: pa.Table, schema: FeedSchema) -> Batches:
    """Batches of prepared rows, by the code that gathers those of a dataset."""
    block = {name: column_view(contiguous(table.column(name))) for name in table.column_names}
    rows = RowGather(schema.features, [table.num_rows], lambda _: block)

    def batch(begin: int, end: int) -> dict[str, Tensor]:
        ids = np.arange(begin, end)
        tensors = rows.take(ids)
        for info, packed in rows.take_lists(ids):
            tensors |= cut_lists(info, packed, [end - begin])[0]
        return tensors

    return batch


def _refusal(problems: Mapping[int, str], num_rows: int) -> DataError:
    said = [problems[row] for row in sorted(problems)]
    advice = 'correct them in the rows given, or have rows reported one by one: on_error="report"'
    if len(said) == 1:
        return DataError(said[0], next_step=advice)
    shown = said[:SHOWN_PROBLEMS] + ([f"and {len(said) - SHOWN_PROBLEMS} more"] if len(said) > SHOWN_PROBLEMS else [])
    return DataError(f"{len(said)} of {counted(num_rows, 'row')} cannot be scored", problems=shown, next_step=advice)
