"""How are the few rows of one request held? As numpy arrays, because a table of one row costs more than the work on it.

A column is
- numbers: an array [rows, *shape] in the column's own dtype, a `numpy.ma.MaskedArray` [rows] where some are null;
- text: an array of objects, str or None;
- anything else (lists of unequal length, bytes, times): an Arrow array.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.columns.fixed_shape import is_number, is_text, single_chunk

__all__ = ["Request", "num_rows", "plain_numbers", "request_of", "schema_of", "table_of"]


Request = dict[str, np.ndarray | pa.Array]

_PLAIN = "?bBhHiIlLqQfd"
"""Numpy's codes of truth values, integers, and floats of 32 and 64 bits."""


def num_rows(request: Request) -> int:
    """Rows of the request; 0 without columns."""
    return len(next(iter(request.values()), ()))


def table_of(request: Mapping[str, np.ndarray | pa.Array]) -> pa.Table:
    """The request as the table that a transform is applied to when a dataset is prepared."""
    return pa.table({name: _arrow(values) for name, values in request.items()})


def _arrow(values: np.ndarray | pa.Array) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, np.ma.MaskedArray):
        return pa.array(values.data, mask=np.ma.getmaskarray(values))
    if values.dtype.kind == "O":
        return pa.array(values, pa.string())
    return tensor_array(values) if values.ndim > 1 else pa.array(values)


def request_of(table: pa.Table) -> Request:
    """The inverse of `table_of`."""
    return {name: _numpy(single_chunk(table.column(name))) for name in table.column_names}


def _numpy(values: pa.Array) -> np.ndarray | pa.Array:
    kind = values.type
    if is_number(kind):
        if not values.null_count:
            return values.to_numpy(zero_copy_only=False)
        zero = pa.scalar(0, pa.int64()).cast(kind)
        return np.ma.MaskedArray(values.fill_null(zero).to_numpy(zero_copy_only=False), values.is_null().to_numpy(False))
    if is_text(kind):
        return values.to_numpy(zero_copy_only=False)
    # A permuted tensor is left alone: numpy's array would be another column.
    if isinstance(kind, pa.FixedShapeTensorType) and not kind.permutation and not values.null_count:
        flat = values.storage.flatten()
        return values if flat.null_count else flat.to_numpy(zero_copy_only=False).reshape(len(values), *kind.shape)
    return values


def schema_of(request: Request) -> pa.Schema:
    """Arrow's types of the columns, as those of `table_of`."""
    return pa.schema([pa.field(name, _type_of(values)) for name, values in request.items()])


def _type_of(values: np.ndarray | pa.Array) -> pa.DataType:
    return values.type if isinstance(values, pa.Array) else _arrow_type(values.dtype, values.shape[1:])


@functools.lru_cache(1024)
def _arrow_type(dtype: np.dtype, shape: tuple[int, ...]) -> pa.DataType:
    if dtype.kind == "O":
        return pa.string()
    if shape:
        return pa.fixed_shape_tensor(pa.from_numpy_dtype(np.uint8 if dtype == np.bool_ else dtype), list(shape))
    return pa.from_numpy_dtype(dtype)


def plain_numbers(values: np.ndarray | pa.Array | None) -> bool:
    """Whether these are numbers [rows], perhaps with nulls, of a type with arithmetic of its own in Arrow: no half floats."""
    return isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.char in _PLAIN
