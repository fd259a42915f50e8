"""How are missing values filled?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import model_validator

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.casts import cast_array
from penstock.ingest.columns.fixed_shape import is_number, is_text
from penstock.ingest.preprocess.learnt import Category, ColumnFacts, ColumnState, Question
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.transform import ColumnNames, Functions, Transform
from penstock.ingest.spec import DataSpec
from penstock.messages import in_yaml

__all__ = ["Imputer", "ImputerOptions"]


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
            fills = dict.fromkeys(self.columns_of(rows.table.schema, data), self.options.fill_value)
        self.require(rows, list(fills))
        for name, fill in fills.items():
            values = rows.column(name)
            if self.options.strategy == "mean":
                values = _as_doubles(name, values)
            if pa.types.is_floating(values.type):
                values = pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)
            try:
                rows.put(name, pc.fill_null(values, _scalar(fill, values.type)))
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
                raise DataError(
                    f"preprocess: imputer: {fill!r} is not a value for column {name!r} of type {values.type}",
                    next_step=f"choose another fill_value, or cast the column before (cast: {{{in_yaml(name)}: float64}})",
                ) from error


def _as_doubles(name: str, values: pa.Array) -> pa.Array:
    try:
        return cast_array(values, pa.float64())
    except pa.ArrowInvalid as error:
        raise DataError(
            f"preprocess: imputer: column {name!r} holds integers that a double would round, as a mean needs ({error})",
            next_step=f"fill it with strategy: most_frequent or constant, or leave it out (drop: [{in_yaml(name)}])",
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
