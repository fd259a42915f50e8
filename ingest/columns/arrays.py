"""How does an Arrow column become numpy's array and back, what is it called in a feed, and how are tables cut to equal rows?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from penstock.errors import DataError
from penstock.ingest.columns.extension_types import (
    DTYPES,
    ImageType,
    RaggedType,
    Variable,
    as_numbers,
    variable_array,
    variable_view,
)
from penstock.ingest.columns.type_text import has_type_text, type_text
from penstock.ingest.schema import ColumnInfo

__all__ = [
    "PROVENANCE_COLUMNS",
    "Block",
    "column_view",
    "columns_of",
    "contiguous",
    "numpy_arrays",
    "rebatched",
    "tensor_array",
]

PROVENANCE_COLUMNS = ("_file", "_row")
"""int32 index into the unit's files, int64 row number in that file."""


def columns_of(schema: pa.Schema) -> tuple[ColumnInfo, ...]:
    """Describe the columns of an Arrow schema, provenance left out.

    Raises:
        DataError: a column has a type that a pipeline file cannot name, such as a union.
    """
    return tuple(_column_info(field) for field in schema if field.name not in PROVENANCE_COLUMNS)


def _column_info(field: pa.Field) -> ColumnInfo:
    kind, shape = field.type, ()
    if isinstance(kind, ImageType):
        return ColumnInfo(name=field.name, dtype="uint8", shape=kind.shape, encoded=True)
    if isinstance(kind, RaggedType) and kind.storage_type.value_type in DTYPES:
        dtype = DTYPES[kind.storage_type.value_type]
        return ColumnInfo(name=field.name, dtype=dtype, ragged=kind.batch, pad_value=kind.pad_value)
    if isinstance(kind, pa.FixedShapeTensorType):
        kind, shape = kind.value_type, tuple(kind.shape)
    if kind not in DTYPES and has_type_text(field.type):
        return ColumnInfo(name=field.name, dtype="object", arrow=type_text(field.type))
    if kind not in DTYPES:
        raise DataError(f"column {field.name!r} has type {field.type}, which a shard cannot hold")
    return ColumnInfo(name=field.name, dtype=DTYPES[kind], shape=shape)


def tensor_array(values: np.ndarray) -> pa.Array:
    """Wrap an array of shape [rows, *shape] as one Arrow column, without a copy where numpy's memory is contiguous.

    Shape () gives a primitive column; bool is kept as uint8, because Arrow packs booleans into bits.
    """
    if values.dtype == np.bool_:
        values = values.astype(np.uint8)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    if values.ndim == 1:
        return flat
    kind = pa.fixed_shape_tensor(flat.type, list(values.shape[1:]))
    width = int(np.prod(values.shape[1:]))
    return pa.ExtensionArray.from_storage(kind, pa.FixedSizeListArray.from_arrays(flat, width))


def contiguous(column: pa.ChunkedArray) -> pa.Array:
    """Return a prepared column as one array of its plain values alone.

    Raises:
        DataError: a value is null, in a column of numbers.
    """
    # Rebuilt from the plain values: a slice would carry its offset, and a validity bitmap its bytes, into the file.
    if isinstance(column.type, RaggedType | ImageType):
        if any(chunk.storage.null_count for chunk in column.chunks):
            raise DataError(f"a column of type {column.type} still holds nulls after it was prepared")
        return variable_array(column.type, [variable_view(chunk) for chunk in column.chunks])
    if not _is_numbers(column.type):
        return pa.concat_arrays(column.chunks).take(pa.array(np.arange(len(column))))
    if not isinstance(column.type, pa.FixedShapeTensorType):
        flat = column.combine_chunks()
        if flat.null_count:
            raise DataError(f"a column of type {column.type} still holds {flat.null_count} nulls after it was prepared")
        return pa.array(flat.to_numpy(zero_copy_only=True))
    values = pa.concat_arrays([chunk.storage.flatten() for chunk in column.chunks])
    width = int(np.prod(column.type.shape))
    if values.null_count or len(values) != len(column) * width:
        raise DataError(f"a column of type {column.type} still holds nulls after it was prepared")
    return pa.ExtensionArray.from_storage(column.type, pa.FixedSizeListArray.from_arrays(values, width))


def _is_numbers(kind: pa.DataType) -> bool:
    return kind in DTYPES or (isinstance(kind, pa.FixedShapeTensorType) and kind.value_type in DTYPES)


def column_view(array: pa.Array) -> np.ndarray | Variable | pa.Array:
    """View one array of a shard's or of a prepared column, read-only and without a copy.

    Returns:
        An array [rows, *shape] or a `Variable`; a column that is not numbers as it is.
    """
    if isinstance(array.type, RaggedType | ImageType):
        return variable_view(array)
    if not _is_numbers(array.type):
        return array
    if not isinstance(array.type, pa.FixedShapeTensorType):
        return as_numbers(array)
    return as_numbers(array.storage.values).reshape(len(array), *array.type.shape)


def rebatched(tables: Iterable[pa.Table], rows: int, most_bytes: int = 1 << 62) -> Iterator[pa.Table]:
    """Yield the same rows in tables of exactly `rows` (the last may be smaller), uncopied.

    Such a table is cut where it would be of more than `most_bytes`; the one after it begins where it would have begun.
    """
    held: list[pa.Table] = []
    held_bytes, left = 0, rows
    for table in tables:
        row_bytes = max(1, table.nbytes // max(1, table.num_rows))
        while table.num_rows:
            take = min(left, max(1, (most_bytes - held_bytes) // row_bytes), table.num_rows)
            held.append(table.slice(0, take))
            table, left, held_bytes = table.slice(take), left - take, held_bytes + take * row_bytes
            if not left or held_bytes + row_bytes > most_bytes:
                yield pa.concat_tables(held)
                held, held_bytes, left = [], 0, left or rows
    if held:
        yield pa.concat_tables(held)


def numpy_arrays(columns: Mapping[str, pa.Array]) -> dict[str, np.ndarray]:
    """Return columns that are not numbers as numpy arrays, most of them of objects, as Ray's numpy batches have them."""
    return {name: column.to_numpy(zero_copy_only=False) for name, column in columns.items()}


Block = Mapping[str, np.ndarray | Variable | pa.Array]
