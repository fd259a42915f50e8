"""How are missing values filled, or kept apart from zeros?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import model_validator

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.fixed_shape import is_number, is_text
from penstock.ingest.preprocess.learnt import Category, ColumnFacts, ColumnState, Question
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.transform import ColumnNames, Functions, Names, Transform
from penstock.ingest.spec import DataSpec
from penstock.messages import in_yaml

__all__ = ["Imputer", "ImputerOptions", "NullMask", "NullMaskOptions"]


class ImputerOptions(Section):
    """Columns whose missing values (null or NaN) are filled."""

    columns: ColumnNames
    """Names, or `*` for every numeric column but the label."""
    strategy: Literal["mean", "most_frequent", "constant"] = "mean"
    """`mean` and `most_frequent` are learnt from the train split; `mean` makes the column float64."""
    fill_value: str | bool | int | float | None = None
    """Only for `strategy: constant`."""

    @model_validator(mode="after")
    def _constant_has_value(self) -> ImputerOptions:
        if (self.strategy == "constant") != (self.fill_value is not None):
            raise ValueError("fill_value belongs to strategy: constant, and that strategy needs it")
        return self


class Imputer(Transform[ImputerOptions]):
    """Fill missing values."""

    Options = ImputerOptions
    takes_nulls = True

    def __init__(self, name: str, options: ImputerOptions) -> None:
        super().__init__(name, options)
        self.learns = options.strategy != "constant"

    def refusal(self, column: str, kind: pa.DataType) -> str | None:
        if self.options.strategy == "most_frequent":
            return None if is_text(kind) or is_number(kind) else "cast it to string or a number first"
        if self.options.strategy == "constant":
            return "leave it out" if pa.types.is_nested(kind) else None
        if is_text(kind):
            return "the mean is for numbers: give strategy: most_frequent, or constant with a fill_value"
        return super().refusal(column, kind)

    def question(self, column: str) -> Question:
        return Question(column, "numbers" if self.options.strategy == "mean" else "categories")

    def learn(self, column: str, facts: ColumnFacts) -> ColumnState:
        return ColumnState(column=column, fill=facts.mean if self.options.strategy == "mean" else facts.most_frequent)

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        fills: dict[str, Category | None] = {state.column: state.fill for state in fitted}
        if not fitted:
            fills = dict.fromkeys(self.columns(rows.table.schema, data.label), self.options.fill_value)
        self.require(rows, list(fills))
        for name, fill in fills.items():
            values = rows.column(name)
            if self.options.strategy == "mean":
                values = values.cast(pa.float64(), safe=False)
            if pa.types.is_floating(values.type):
                values = pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)
            try:
                rows.put(name, pc.fill_null(values, _scalar(fill, values.type)))
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
                raise DataError(
                    f"preprocess: imputer: {fill!r} is not a value for column {name!r} of type {values.type}",
                    next_step=f"choose another fill_value, or cast the column before (cast: {{{in_yaml(name)}: float64}})",
                ) from error


def _scalar(fill: Category | None, kind: pa.DataType) -> pa.Scalar:
    """Convert the fill to a value of the column; pyarrow would convert 0.5 to 0 for a column of integers."""
    if isinstance(fill, float) and pa.types.is_integer(kind):
        if not fill.is_integer():
            raise pa.ArrowInvalid(f"{fill} is not an integer")
        fill = int(fill)
    scalar = pa.scalar(fill, kind)
    if pa.types.is_floating(kind) and math.isinf(scalar.as_py()):
        raise pa.ArrowInvalid(f"{fill} is beyond {kind}")
    return scalar


class NullMaskOptions(Section):
    """Columns that may be null: the value becomes 0 there, and a new column marks the rows."""

    columns: Names
    """Names of number columns. Column `x` gets a column `x_is_null` beside it: uint8, 1 where there was a null or NaN."""


class NullMask(Transform[NullMaskOptions]):
    """Nulls to zeros, and a column that marks them."""

    Options = NullMaskOptions
    takes_nulls = True

    def names_after(self, names: Sequence[str]) -> list[str]:
        return [*names, *(f"{name}_is_null" for name in self.options.columns)]

    def refusal(self, column: str, kind: pa.DataType) -> str | None:
        if is_number(kind):
            return None
        if is_text(kind):
            return f"encode it first (ordinal: {{columns: [{in_yaml(column)}]}})"
        return f"it takes columns of one number a row; cast this one first, or leave it out (drop: [{in_yaml(column)}])"

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        for name in self.columns(rows.table.schema, data.label):
            if name == data.label:
                raise DataError(
                    f"preprocess: null_mask: column {name!r} is the label, and 0 is not a label",
                    next_step="correct the labels in the source, or leave such rows out (data.invalid: drop)",
                )
            values, mask = rows.column(name), f"{name}_is_null"
            if mask in rows.table.column_names:
                raise DataError(f"preprocess: null_mask: there is a column {mask!r} already", next_step="rename it")
            missing = pc.is_null(values, nan_is_null=True)
            rows.put(name, pc.if_else(missing, pa.scalar(0, pa.int64()).cast(values.type), values))
            rows.put(mask, missing.cast(pa.uint8()))
