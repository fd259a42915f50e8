"""How do several columns become one vector?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pyarrow as pa

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.columns.casts import is_list
from penstock.ingest.columns.fixed_shape import is_number, numbers
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.transform import ColumnNames, Functions, Transform
from penstock.ingest.spec import DataSpec
from penstock.messages import in_yaml

__all__ = ["Concatenator", "ConcatenatorOptions"]

_JOINED_ROWS = 1024
"""Rows whose columns are put side by side at once: they stay in the processor's cache until they are whole."""


class ConcatenatorOptions(Section):
    """Numbers and vectors put side by side into one vector column; the input columns go."""

    columns: ColumnNames
    """Names, in the order of the vector, or `*` for all numbers and vectors but the label, in the order of the columns."""
    output: str = "features"
    """Name of the vector column."""
    dtype: Literal["float32", "float64", "float16"] = "float32"
    """Type of its elements. A whole number that it cannot represent is an error; fractions are rounded."""


class Concatenator(Transform[ConcatenatorOptions]):
    """One vector out of several columns."""

    Options = ConcatenatorOptions

    def matches(self, kind: pa.DataType) -> bool:
        # Not images, which are tensors, too.
        return is_number(kind) or (isinstance(kind, pa.FixedShapeTensorType) and len(kind.shape) == 1)

    def refusal(self, column: str, kind: pa.DataType) -> str | None:
        # Whether lists are all of one length is checked when rows are read.
        takes = is_number(kind) or is_list(kind) or isinstance(kind, pa.FixedShapeTensorType)
        return None if takes else "one_hot or ordinal it first, or cast it"

    def names_after(self, names: Sequence[str]) -> list[str]:
        gone = self.named(None)
        return [*(name for name in names if name not in gone), self.options.output]

    def columns(self, schema: pa.Schema, label: str | None) -> list[str]:
        names, output = super().columns(schema, label), self.options.output
        if output in schema.names and output not in names:
            raise DataError(
                f"preprocess: concatenator: there is a column {output!r} already", next_step="choose another output"
            )
        return names

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        names = self.columns_of(rows.table.schema, data)
        for name in names:
            rows.fix_shape(name)
            if not rows.num_rows:
                return
        count = rows.num_rows
        parts = [numbers(rows.column(name)).reshape(count, -1) for name in names]
        for name, part in zip(names, parts, strict=True):
            if (lost := _first_lost(part, self.options.dtype)) is not None:
                row, held, made = lost
                raise DataError(
                    f"preprocess: concatenator: {rows.origin.place(row)}: {name!r} holds {held}, which "
                    f"{self.options.dtype} makes {made}",
                    next_step=f"scale it before (standard_scaler: {{columns: [{in_yaml(name)}]}}), "
                    "set concatenator.dtype: float64, "
                    f"or leave it out (drop: [{in_yaml(name)}])",
                )
        joined = np.empty((count, sum(part.shape[1] for part in parts)), self.options.dtype)
        for start in range(0, count, _JOINED_ROWS):
            stop = start + _JOINED_ROWS
            np.concatenate([part[start:stop] for part in parts], axis=1, out=joined[start:stop])
        joined_names = set(names)
        rows.table = rows.table.select([name for name in rows.table.column_names if name not in joined_names])
        rows.put(self.options.output, tensor_array(joined))


def _first_lost(values: np.ndarray, dtype: str) -> tuple[int, float, float] | None:
    """Return (row, value, changed value) of the first whole number that changes in `dtype`, or fraction that changes by 1.

    Seconds since 1970 in float32 are the same for two minutes.
    """
    if not values.size or (values.dtype.kind == "f" and np.can_cast(values.dtype, dtype)):
        return None
    if max(abs(float(values.min())), abs(float(values.max()))) <= 2 ** (np.finfo(dtype).nmant + 1):
        return None
    with np.errstate(over="ignore"):
        kept = values.astype(dtype)
    lost = ~np.isfinite(kept)
    if values.dtype.kind == "f":
        wide = kept.astype(np.float64)
        lost |= (wide != values) & ((values == np.trunc(values)) | (np.abs(wide - values) >= 1))
    else:
        # As integers, since two of them may be one float of 64 bits; what is beyond the last of them cannot be kept.
        lost |= np.abs(kept.astype(np.float64)) >= float(np.iinfo(values.dtype).max)
        lost |= np.where(lost, 0, kept).astype(values.dtype) != np.where(lost, 0, values)
    if not lost.any():
        return None
    row, place = (int(index[0]) for index in np.nonzero(lost))
    held, made = values[row, place].item(), kept[row, place].item()
    return row, _plain(held), _plain(made)


def _plain(value: float) -> float:
    return int(value) if float(value).is_integer() else value
