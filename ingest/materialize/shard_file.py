"""What is the format of a shard? One Arrow IPC file with exactly one uncompressed record batch.

With one batch, every column is one contiguous run of bytes (a list column also one of offsets), so that a reader maps the file
and returns numpy views without a copy. Each row also has its place in the source: `_file` (index into the files of the unit)
and `_row` (row number in that file, from 0). These two are not part of the feed's schema.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from penstock.errors import DataError, ShardError
from penstock.ingest.columns.arrays import PROVENANCE_COLUMNS, column_view, columns_of, contiguous
from penstock.ingest.columns.extension_types import Variable, variable_view
from penstock.ingest.schema import ColumnInfo

__all__ = ["ShardBuffer", "ShardReader", "open_shard", "rows_of_shards", "with_provenance", "write_shard"]

PIECE_BYTES = 1 << 20

_PROVENANCE_BYTES = 12


def with_provenance(table: pa.Table, files: np.ndarray, rows: np.ndarray) -> pa.Table:
    """Append `_file` (int32) and `_row` (int64), one value per row of `table`."""
    table = table.append_column(PROVENANCE_COLUMNS[0], pa.array(files.astype(np.int32, copy=False)))
    return table.append_column(PROVENANCE_COLUMNS[1], pa.array(rows.astype(np.int64, copy=False)))


def write_shard(path: str | Path, tables: Sequence[pa.Table]) -> int:
    """Write `tables` as one record batch and return its rows. The bytes depend only on the rows, not on the cuts of the tables.

    Raises:
        DataError: a value is null, or there are no rows.
    """
    table = pa.concat_tables(tables)
    if table.num_rows == 0:
        raise DataError(f"shard {Path(path).name}: no rows to write")
    # Nullability and metadata are part of the bytes, so both are fixed here.
    arrow = {info.name for info in columns_of(table.schema) if info.arrow is not None}
    schema = pa.schema([pa.field(field.name, field.type, nullable=field.name in arrow) for field in table.schema])
    batch = pa.RecordBatch.from_arrays([contiguous(column) for column in table.columns], schema=schema)
    with _InPieces(path, "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(batch)
    return int(batch.num_rows)


class _InPieces(io.FileIO):
    """A file that is written at most `PIECE_BYTES` at a time.

    For larger writes Linux uses pages of 2 MB and more in its cache, which are slow to get in a virtual machine.
    """

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        view, done = memoryview(data).cast("B"), 0
        try:
            while done < len(view):
                done += super().write(view[done : done + PIECE_BYTES])
        except OSError as error:
            error.filename = self.name
            raise
        return done


class ShardBuffer:
    """Buffer that cuts the prepared rows of one split into shards of about `shard_bytes`.

    The cuts depend only on the rows and `shard_bytes`, not on the tables in which the rows come.
    """

    def __init__(self, shard_bytes: int) -> None:
        self._shard_bytes = shard_bytes
        self._tables: list[pa.Table] = []
        self._bytes = 0

    def add(self, table: pa.Table) -> Iterator[list[pa.Table]]:
        """Add `table`; yield the content of each full shard."""
        ends = np.cumsum(_row_bytes(table))
        taken = 0
        while taken < table.num_rows:
            before = int(ends[taken - 1]) if taken else 0
            upto = int(np.searchsorted(ends, before + self._shard_bytes - self._bytes, side="right"))
            if upto == taken and not self._tables:
                upto += 1  # a row larger than a shard
            if upto > taken:
                self._tables.append(table.slice(taken, upto - taken))
                self._bytes += int(ends[upto - 1]) - before
                taken = upto
            if taken < table.num_rows or self._bytes >= self._shard_bytes:
                yield self._take()

    def finish(self) -> Iterator[list[pa.Table]]:
        """Yield the remaining rows as the last shard."""
        if self._tables:
            yield self._take()

    def _take(self) -> list[pa.Table]:
        tables, self._tables, self._bytes = self._tables, [], 0
        return tables


def rows_of_shards(columns: Sequence[ColumnInfo], rows: int, shard_bytes: int) -> list[int]:
    """Return the rows of each shard that `ShardBuffer` cuts `rows` rows into; one shard of all where rows differ in size."""
    most = rows if any(map(_differs, columns)) else max(1, shard_bytes // (_PROVENANCE_BYTES + sum(map(_fixed_bytes, columns))))
    return [min(most, rows - begin) for begin in range(0, rows, max(1, most))]


def _differs(column: ColumnInfo) -> bool:
    return column.varies or column.encoded


def _fixed_bytes(column: ColumnInfo) -> int:
    return np.dtype(column.dtype).itemsize * int(np.prod(column.shape))


def _row_bytes(table: pa.Table) -> np.ndarray:
    """Return the bytes of each row in a shard, with those of provenance: int64 [rows]."""
    sizes = np.full(table.num_rows, _PROVENANCE_BYTES, np.int64)
    for info in columns_of(table.schema):
        if info.arrow is not None:
            sizes += np.concatenate([_value_bytes(chunk) for chunk in table.column(info.name).chunks])
            continue
        if not _differs(info):
            sizes += _fixed_bytes(info)
            continue
        chunks = [variable_view(chunk) for chunk in table.column(info.name).chunks]
        sizes += np.concatenate([np.diff(chunk.offsets) for chunk in chunks]) * np.dtype(info.dtype).itemsize + 8
    return sizes


def _value_bytes(values: pa.Array) -> np.ndarray:
    """Return about the bytes of each value of any type: int64 [rows]."""
    kind = values.type
    if pa.types.is_struct(kind):
        return sum((_value_bytes(field) for field in values.flatten()), np.zeros(len(values), np.int64))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64) + 8
    if pa.types.is_map(kind):  # for which list_value_length has no kernel
        entry = pa.struct([pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)])
        values = values.cast(pa.list_(entry))
    if pa.types.is_nested(kind):
        lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        upto = np.concatenate([np.zeros(1, np.int64), np.cumsum(_value_bytes(pc.list_flatten(values)))])
        ends = np.cumsum(lengths)
        return upto[ends] - upto[ends - lengths] + 8
    return np.full(len(values), 8, np.int64)


class ShardReader:
    """A mapped shard. Columns are views into the file and keep it mapped."""

    def __init__(self, path: str | Path, batch: pa.RecordBatch) -> None:
        self.path = str(path)
        self.rows = int(batch.num_rows)
        self.columns = columns_of(batch.schema)
        self._batch = batch

    def column(self, name: str) -> np.ndarray | Variable | pa.Array:
        """View the column, read-only (see `column_view`); `_file` and `_row` are columns, too.

        Raises:
            KeyError: the column does not exist.
        """
        index = self._batch.schema.get_field_index(name)
        if index < 0:
            raise KeyError(f"no column {name!r} in {self.path}; it has {self._batch.schema.names}")
        return column_view(self._batch.column(index))


def open_shard(path: str | Path) -> ShardReader:
    """Map a local shard file.

    Raises:
        ShardError: the file is missing, torn, or not a shard.
    """
    try:
        with pa.memory_map(str(path), "r") as source:
            reader = pa.ipc.open_file(source)
            if reader.num_record_batches != 1:
                raise ShardError(f"shard {path} has {reader.num_record_batches} record batches; a shard has exactly one")
            return ShardReader(path, reader.get_batch(0))
    except (pa.ArrowInvalid, OSError) as error:
        raise ShardError(f"shard {path} cannot be read: {error}") from error
