"""How do numpy's files become rows? The first axis is that of the rows; nothing is unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy

from penstock.errors import DataError
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import open_input
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.reader import FileFacts, Reader, conform, reading
from penstock.ingest.spec import DataSpec

__all__ = ["NumpyFormat", "NumpyReader"]

_TABLE_BYTES = 16 << 20

_SHAPE_AND_ORDER = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class NumpyFormat(Format):
    """Arrays whose first axis is the rows: an .npz is a column per array, an .npy the column `x`, or one per field."""

    extensions = (".npy", ".npz")

    def reader(self, data: DataSpec, options: None) -> NumpyReader:
        """Read arrays."""
        return NumpyReader(data.read_columns)


class _Array(NamedTuple):
    """An array in a file, read up to its data."""

    stream: IO[bytes]
    dtype: np.dtype
    shape: tuple[int, ...]

    def read(self, rows: int) -> np.ndarray:
        """Return the next rows."""
        wanted = rows * int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize
        data = self.stream.read(wanted)
        if len(data) != wanted:
            raise ValueError(f"cut off: {wanted - len(data)} bytes are missing")
        return np.frombuffer(data, self.dtype).reshape(rows, *self.shape[1:])


class NumpyReader(Reader):
    """Arrays, some rows of all of them at a time."""

    def __init__(self, columns: list[str] | None) -> None:
        self._wanted = columns

    def inspect(self, file: SourceFile) -> FileFacts:
        """Read the headers, and the file's size."""
        with self._arrays(file) as arrays:
            rows = next(iter(arrays.values())).shape[0]
            none = {name: kind for name, array in arrays.items() for name, kind in self._columns(file, name, array, 0)}
            for array in arrays.values():
                array.stream.seek(array.stream.tell() + max(0, rows - 1) * _row_bytes(array))
                array.read(min(rows, 1))
                if array.stream.read(1):
                    raise DataError(
                        f"{file.uri}: data lie behind an array, perhaps another one", next_step="save each in a file"
                    )
        return FileFacts({name: values.type for name, values in none.items()}, rows)

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows, about 16 MiB at a time."""
        with self._arrays(file) as arrays:
            row_bytes = sum(map(_row_bytes, arrays.values()))
            total = next(iter(arrays.values())).shape[0]
            table_rows = max(1, min(batch_rows, _TABLE_BYTES // max(1, row_bytes)))
            for first_row in range(0, total, table_rows):
                rows = min(table_rows, total - first_row)
                columns = {
                    column: values for name, each in arrays.items() for column, values in self._columns(file, name, each, rows)
                }
                yield conform(pa.table({field.name: columns[field.name] for field in schema}), schema, file, first_row)

    def _columns(self, file: SourceFile, name: str, array: _Array, rows: int) -> Iterator[tuple[str, pa.Array]]:
        values = array.read(rows)
        for column in array.dtype.names or (None,):
            part = values if column is None else values[column]
            try:
                made = _as_arrow(part)
            except (pa.ArrowException, ValueError, TypeError) as error:
                raise DataError(
                    f"{file.uri}: {column or name!r} holds {part.dtype} of shape {part.shape[1:]} a row, which is not read",
                    next_step="save it with another dtype, such as array.astype('float64') or 'datetime64[us]'",
                ) from error
            yield column or name, made

    @contextmanager
    def _arrays(self, file: SourceFile) -> Iterator[dict[str, _Array]]:
        with reading(file, "numpy"), ExitStack() as stack:
            source = stack.enter_context(open_input(file.uri))
            found: dict[str, _Array]
            if source.read(2) == b"PK":
                archive = stack.enter_context(zipfile.ZipFile(source))
                names = [name for name in archive.namelist() if name.endswith(".npy")]
                found = {name[:-4]: _opened(file, name[:-4], stack.enter_context(archive.open(name))) for name in names}
                if self._wanted is not None and {*self._wanted} <= found.keys():
                    found = {name: found[name] for name in self._wanted}  # others may be of other rows
            else:
                source.seek(0)
                found = {"x": _opened(file, "x", source)}
            rows = {name: array.shape[0] for name, array in found.items()}
            if len(set(rows.values())) != 1:
                raise DataError(
                    f"{file.uri}: its arrays differ in their first axis, the rows: {rows}" if rows else f"{file.uri}: no array",
                    next_step="name those with the same rows in data.columns, or save arrays of as many rows as each other",
                )
            yield found


def _opened(file: SourceFile, name: str, stream: Any) -> _Array:
    version = npy.read_magic(stream)
    if version not in _SHAPE_AND_ORDER:
        raise ValueError(f"version {version} of numpy's format")
    shape, fortran, dtype = _SHAPE_AND_ORDER[version](stream)
    refused = {
        "holds Python objects, which are not unpickled": (dtype.hasobject, "save it with a plain dtype"),
        "is one number, not rows": (not shape, "save an array whose first axis is the rows"),
        "is in Fortran's order": (fortran and len(shape) > 1, "save np.ascontiguousarray(array)"),
        "holds complex numbers": (dtype.kind == "c", "save their real and imaginary parts"),
    }
    for what, (is_so, advice) in refused.items():
        if is_so:
            raise DataError(f"{file.uri}: array {name!r} {what}", next_step=advice)
    return _Array(stream, dtype, shape)


def _row_bytes(array: _Array) -> int:
    return int(np.prod(array.shape[1:], dtype=np.int64)) * array.dtype.itemsize


def _as_arrow(values: np.ndarray) -> pa.Array:
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    if values.ndim > 1:
        return tensor_array(values)
    if values.dtype.kind == "S":
        return pa.array(values.tolist(), pa.binary())
    return pa.array(values.tolist(), pa.string()) if values.dtype.kind == "U" else pa.array(np.ascontiguousarray(values))
