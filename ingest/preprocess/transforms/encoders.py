"""How do categories become numbers? One lookup of each value's code, written as a vector or as an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import PositiveInt, model_validator

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.columns.fixed_shape import is_text
from penstock.ingest.preprocess.learnt import ColumnFacts, ColumnState, Question
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.transform import ColumnNames, Functions, Transform
from penstock.ingest.spec import DataSpec
from penstock.messages import shorten

__all__ = [
    "MAX_ONE_HOT",
    "EncoderOptions",
    "LabelEncoder",
    "LabelEncoderOptions",
    "OneHot",
    "OneHotOptions",
    "Ordinal",
    "OrdinalOptions",
]


MAX_ONE_HOT = 10_000
"""A longer one-hot vector is a mistake: 40 KB a row, where an embedding takes one integer."""

O = TypeVar("O")  # noqa: E741 - the options


class EncoderOptions(Section):
    """Categorical columns (strings, integers, booleans)."""

    columns: ColumnNames
    """Names, or `*` for every string column but the label."""


Unknown = Literal["error", "ignore", "code"]
"""What becomes of a category that the train split does not have."""


class OneHotOptions(EncoderOptions):
    """A float32 vector per column with a 1 at the category's place; all zeros for a category not in the train split."""

    max_categories: PositiveInt | None = None
    """Keep only this many categories, the most frequent in the train split; the others become zeros."""
    unknown: Unknown = "ignore"
    """What becomes of a category that the train split does not have. `ignore` writes zeros, `code` gives it the last place of
    the vector; both count it. `error` rejects the row. A null is not a category."""

    @model_validator(mode="after")
    def _knows_what_is_rare(self) -> OneHotOptions:
        if self.unknown == "error" and self.max_categories is not None:
            raise ValueError("with max_categories rare categories are unknown on purpose: unknown must be ignore or code")
        return self


class OrdinalOptions(EncoderOptions):
    """Categorical columns (strings, integers, booleans)."""

    unknown: Unknown = "error"
    """What becomes of a category that the train split does not have. `error` rejects the row. `ignore` writes a null, which an
    imputer may fill, and `code` writes the index after the last; both count it. A null is not a category."""


class LabelEncoderOptions(Section):
    """The label becomes the index of its class, int64, classes in sorted order."""

    column: str | None = None
    """Name of the label at this point, if an earlier transform renamed it; by default `data.label`."""


def _find_codes(kind: str, values: pa.Array, state: ColumnState) -> pa.Array:
    """Return the index of each value among the learnt categories, null for one that is not among them.

    Raises:
        DataError: the values have another type than those that were learnt.
    """
    try:
        keys = pa.array(state.categories or ()).cast(values.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"preprocess: {kind} was fitted on other values than column {state.column!r} of type {values.type} holds"
        ) from error
    return pc.index_in(values, keys)


def _shown(value: Any, state: ColumnState) -> str:
    """Format a value that was not learnt, and the one that was and looks like it."""
    form = normalize("NFC", str(value))
    alike = [known for known in state.categories or () if known != value and normalize("NFC", str(known)) == form]
    return shorten(value) + (f" ({value!a}, in another Unicode form than {alike[0]!a})" if alike else "")


class _Encoder(Transform[O]):
    learns = True

    def matches(self, kind: pa.DataType) -> bool:
        return is_text(kind)

    def refusal(self, column: str, kind: pa.DataType) -> str | None:
        takes = is_text(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)
        return None if takes else "cast it to string or int64 first"

    def question(self, column: str) -> Question:
        return Question(column, "categories")

    def learn(self, column: str, facts: ColumnFacts) -> ColumnState:
        return ColumnState(column=column, categories=facts.categories)

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        self.require(rows, [state.column for state in fitted])
        for state in fitted:
            name = state.column
            rows.reject_missing(name)
            values = rows.column(name)
            self._put(rows, state, _find_codes(self.name, values, state))

    def _put(self, rows: Rows, state: ColumnState, codes: pa.Array) -> None:
        """Replace the column by its codes, as a subclass writes them; a code is null for a value that was not learnt."""
        name, values, unseen = state.column, rows.column(state.column), codes.is_null().to_numpy(zero_copy_only=False)
        rows.reject(unseen, "unknown category", name, lambda row: _shown(values[row].as_py(), state))
        rows.put(name, pc.drop_null(codes).cast(pa.int64()))

    def _count(self, rows: Rows, name: str, unseen: np.ndarray) -> None:
        if unseen.any():
            rows.unseen[name] = rows.unseen.get(name, 0) + int(unseen.sum())


class OneHot(_Encoder[OneHotOptions]):
    """A vector per categorical column."""

    Options = OneHotOptions
    widens_rows = True

    def question(self, column: str) -> Question:
        return Question(column, "categories", max_categories=self.options.max_categories)

    def learn(self, column: str, facts: ColumnFacts) -> ColumnState:
        if len(facts.categories) > MAX_ONE_HOT:
            raise DataError(
                f"preprocess: {self.name}: column {column!r} has {len(facts.categories):,} categories; vectors longer than "
                f"{MAX_ONE_HOT:,} are refused",
                next_step=f"use ordinal and an embedding, or keep the most frequent (max_categories: {MAX_ONE_HOT})",
            )
        return super().learn(column, facts)

    def _put(self, rows: Rows, state: ColumnState, codes: pa.Array) -> None:
        name, unseen = state.column, codes.is_null().to_numpy(zero_copy_only=False)
        if self.options.unknown == "error":
            values = rows.column(name)
            rows.reject(unseen, "unknown category", name, lambda row: _shown(values[row].as_py(), state))
            codes, unseen = pc.drop_null(codes), np.zeros(int((~unseen).sum()), np.bool_)
        self._count(rows, name, unseen)
        vectors = np.zeros((len(codes), self._width(state)), np.float32)
        vectors[np.flatnonzero(~unseen), pc.drop_null(codes).to_numpy()] = 1
        if self.options.unknown == "code":
            vectors[unseen, -1] = 1
        rows.put(name, tensor_array(vectors))

    def _width(self, state: ColumnState) -> int:
        return len(state.categories or ()) + (self.options.unknown == "code")


class Ordinal(_Encoder[OrdinalOptions]):
    """An int64 index per category, in sorted order; a category that the train split does not have is an error, or `unknown`."""

    Options = OrdinalOptions

    def _put(self, rows: Rows, state: ColumnState, codes: pa.Array) -> None:
        if self.options.unknown == "error":
            super()._put(rows, state, codes)
            return
        self._count(rows, state.column, codes.is_null().to_numpy(zero_copy_only=False))
        codes = codes.cast(pa.int64())
        if self.options.unknown == "code":
            codes = pc.fill_null(codes, len(state.categories or ()))
        rows.put(state.column, codes)


class LabelEncoder(_Encoder[LabelEncoderOptions]):
    """Class names to class indices."""

    Options = LabelEncoderOptions
    names_classes = True

    def named(self, label: str | None) -> Sequence[str]:
        return [column] if (column := self.options.column or label) else []

    def wanted(self, schema: pa.Schema, label: str | None) -> Sequence[str]:
        column = self.options.column or label
        if not column:
            raise DataError("preprocess: label_encoder needs a label", next_step="set data.label, or label_encoder.column")
        return [column]
