"""How are missing numbers kept apart from zeros?"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.fixed_shape import is_number, is_text
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.transform import Functions, Names, Transform
from penstock.ingest.spec import DataSpec
from penstock.messages import in_yaml

__all__ = ["NullMask", "NullMaskOptions"]


class NullMaskOptions(Section):
    """Columns that may be null: the value becomes 0 there, and a new column says where."""

    columns: Names
    """Names of number columns. Column `x` gets a column `x_is_null` beside it: uint8, 1 where there was a null or NaN."""


class NullMask(Transform[NullMaskOptions]):
    """Nulls to zeros, and a column that says where they were."""

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
                    f"preprocess: null_mask: column {name!r} is the label, and 0 is no label",
                    next_step="correct the labels in the source, or leave such rows out (data.invalid: drop)",
                )
            values, mask = rows.column(name), f"{name}_is_null"
            if mask in rows.table.column_names:
                raise DataError(f"preprocess: null_mask: there is a column {mask!r} already", next_step="rename it")
            missing = pc.is_null(values, nan_is_null=True)
            rows.put(name, pc.if_else(missing, pa.scalar(0, pa.int64()).cast(values.type), values))
            rows.put(mask, missing.cast(pa.uint8()))
