"""How do categories become numbers? One lookup of each value's code, written as a vector or as an index."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, TypeVar
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

__all__ = ["EncoderOptions", "LabelEncoder", "LabelEncoderOptions", "OneHot", "OneHotOptions", "Ordinal", "OrdinalOptions"]

_MAX_ONE_HOT = 10_000
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


def _shown(values: pa.Array, state: ColumnState, row: int) -> str:
    """Format a value that was not learnt, and the one that was and looks like it."""
    value = values[row].as_py()
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
            name, unknown = state.column, getattr(self.options, "unknown", "error")
            rows.reject_missing(name)
            values = rows.column(name)
            codes = _find_codes(self.name, values, state).cast(pa.int64())
            unseen = codes.is_null().to_numpy(zero_copy_only=False)
            if unknown == "error":
                rows.reject(unseen, "unknown category", name, partial(_shown, values, state))
                codes = pc.drop_null(codes)
            elif unseen.any():
                rows.unseen[name] += int(unseen.sum())
                codes = pc.fill_null(codes, len(state.categories or ())) if unknown == "code" else codes
            rows.put(name, self.written(codes, state))

    def written(self, codes: pa.Array, state: ColumnState) -> pa.Array:
        """Return the column of int64 codes, of which those that stay unknown are null."""
        return codes


class OneHot(_Encoder[OneHotOptions]):
    """A vector per categorical column."""

    Options = OneHotOptions
    widens_rows = True

    def question(self, column: str) -> Question:
        return Question(column, "categories", max_categories=self.options.max_categories)

    def learn(self, column: str, facts: ColumnFacts) -> ColumnState:
        if len(facts.categories) > _MAX_ONE_HOT:
            raise DataError(
                f"preprocess: {self.name}: column {column!r} has {len(facts.categories):,} categories; vectors longer than "
                f"{_MAX_ONE_HOT:,} are refused",
                next_step=f"use ordinal and an embedding, or keep the most frequent (max_categories: {_MAX_ONE_HOT})",
            )
        return super().learn(column, facts)

    def written(self, codes: pa.Array, state: ColumnState) -> pa.Array:
        vectors = np.zeros((len(codes), len(state.categories or ()) + (self.options.unknown == "code")), np.float32)
        known = codes.is_valid().to_numpy(zero_copy_only=False)
        vectors[np.flatnonzero(known), pc.drop_null(codes).to_numpy()] = 1
        return tensor_array(vectors)


class Ordinal(_Encoder[OrdinalOptions]):
    """An int64 index per category, in sorted order; a category that the train split does not have is an error, or `unknown`."""

    Options = OrdinalOptions


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
