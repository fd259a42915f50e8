"""How are Parquet files read? Their footer gives schema and row count; damaged pages show up while rows are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.errors import DataError, PenstockError
from penstock.ingest.columns.fixed_shape import is_text
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import open_input, read_problem
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.reader import FileFacts, Reader, conform, declared_columns, reading, rows_between
from penstock.ingest.spec import DataSpec

__all__ = ["ParquetFormat", "ParquetReader"]

_BATCH_BYTES = 64 << 20
"""Of all columns, decoded at a time."""

_HEAVY_ROW_BYTES, _STREAM_BYTES = 1 << 20, 8 << 20
"""Decoded rows from which on a row group of more than a batch is read in requests of so many bytes, and not held whole."""


class ParquetFormat(Format):
    """Columns with their types; encoded images too, as structs with the field `bytes`."""

    extensions = (".parquet", ".pq", ".parq")

    def reader(self, data: DataSpec, options: None) -> ParquetReader:
        """Read row groups."""
        return ParquetReader()


class ParquetReader(Reader):
    """Parquet files, one row group after the other."""

    inspects_rows = False

    def inspect(self, file: SourceFile) -> FileFacts:
        """Read the footer."""
        with _open_parquet(file) as parquet:
            return FileFacts(declared_columns(file, parquet.schema_arrow), parquet.metadata.num_rows)

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows, a batch at a time within each row group."""
        yield from self._rows(file, schema, batch_rows, 0)

    def pieces(self, file: SourceFile, piece_bytes: int) -> list[tuple[int, int]]:
        """Row groups together, up to about `piece_bytes` of them as they lie in the file."""
        found: list[tuple[int, int]] = []
        held, first_row, end = 0, 0, 0
        with _open_parquet(file) as parquet:
            groups = [parquet.metadata.row_group(number) for number in range(parquet.num_row_groups)]
            # Sizes of columns would be exact, but asking for those of an encrypted column ends the process.
            packed = file.size_bytes / max(1, sum(group.total_byte_size for group in groups))
            for group in groups:
                size = round(group.total_byte_size * packed)
                if held and held + size > piece_bytes:
                    found.append((first_row, end))
                    held, first_row = 0, end
                held, end = held + size, end + group.num_rows
        return [*found, (first_row, end)] if end > first_row else found

    def piece(self, file: SourceFile, schema: pa.Schema, batch_rows: int, first_row: int, end: int) -> Iterator[pa.Table]:
        """Begin at the row group that holds the row."""
        yield from rows_between(self._rows(file, schema, batch_rows, first_row), first_row, first_row, end)

    def _rows(self, file: SourceFile, schema: pa.Schema, batch_rows: int, begin: int) -> Iterator[pa.Table]:
        """Yield the rows from `begin` on."""
        with _open_parquet(file, batch_rows) as parquet:
            for groups, first_row in _read_together(parquet.metadata, begin, batch_rows):
                row_bytes = max(1, sum(group.size for group in groups) // max(1, sum(group.rows for group in groups)))
                at_once = max(1, min(batch_rows, _BATCH_BYTES // row_bytes))
                numbers = [group.number for group in groups]
                try:
                    for batch in parquet.iter_batches(at_once, row_groups=numbers, columns=schema.names, use_threads=False):
                        for part in _in_parts(batch):
                            table = conform(pa.Table.from_batches([part]), schema, file, first_row)
                            first_row += part.num_rows
                            if first_row > begin:
                                yield table.slice(max(0, table.num_rows - (first_row - begin)))
                except (OSError, pa.ArrowException) as error:
                    raise _unreadable_groups(file, groups, error) from error


class _RowGroup(NamedTuple):
    number: int
    start: int
    rows: int
    size: int
    """Bytes, decoded."""


def _read_together(metadata: pq.FileMetaData, begin: int, batch_rows: int) -> Iterator[tuple[list[_RowGroup], int]]:
    """Yield row groups from row `begin` on that are read in one go, and their first row: all that are smaller than a batch.

    Their ends then cut no batch in two. Not all of a file at once: what is read ahead stays in memory until all of it is read.
    """
    held, held_bytes, start = list[_RowGroup](), 0, 0
    for number in range(metadata.num_row_groups):
        group = _RowGroup(number, start, metadata.row_group(number).num_rows, metadata.row_group(number).total_byte_size)
        start += group.rows
        if start <= begin:
            continue
        if held and (held[0].rows >= batch_rows or held_bytes + group.size > _BATCH_BYTES):
            yield held, held[0].start
            held, held_bytes = [], 0
        held.append(group)
        held_bytes += group.size
    if held:
        yield held, held[0].start


def _in_parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch where its texts would be of more than `_BATCH_BYTES`: a text that many rows share is once in the file."""
    sizes = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            sizes += pc.fill_null(pc.take(pc.binary_length(column.dictionary), column.indices), 0).to_numpy(
                zero_copy_only=False
            )
    ends, begin = np.cumsum(sizes), 0
    while begin < batch.num_rows:
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + _BATCH_BYTES, side="right")))
        yield batch.slice(begin, end - begin)
        begin = end


def _unreadable_groups(file: SourceFile, groups: Sequence[_RowGroup], error: OSError | pa.ArrowException) -> PenstockError:
    """Return the error to raise for row groups that are read together."""
    first, last = groups[0], groups[-1]
    numbers = f"row group {first.number}" if first is last else f"row groups {first.number} to {last.number}"
    where = f"{file.uri}: {numbers} (rows {first.start} to {last.start + last.rows - 1})"
    if "decrypt" in str(error):
        return _encrypted(file)
    if "Expected all lists to be of size" in str(error):
        return DataError(
            f"{where}: a column of fixed-size lists has a null row, which pyarrow cannot read from Parquet ({error})",
            next_step="write the column as list<...>, or leave it out of data.columns",
        )
    return type(read_problem(file.uri, error))(
        f"{where} cannot be read: {error}", next_step="the file is damaged: write it again or restore it"
    )


@contextmanager
def _open_parquet(file: SourceFile, batch_rows: int = 0) -> Iterator[pq.ParquetFile]:
    """Open a file. Long texts that many rows share come as dictionaries if `batch_rows` of them would be too large."""
    with reading(file, "Parquet"), open_input(file.uri) as source:
        # INT96, the times of older Spark and Impala, would else be nanoseconds, of which 9999-12-31 wraps to 1816.
        try:
            opened = partial(pq.ParquetFile, source, page_checksum_verification=True, coerce_int96_timestamp_unit="us")
            parquet = opened(pre_buffer=True)
            opened = partial(opened, metadata=parquet.metadata)
            texts = [field.name for field in parquet.schema_arrow if is_text(field.type)]
            shared = texts if texts and batch_rows and _longest(opened, texts) * batch_rows > _BATCH_BYTES else None
            streams = batch_rows > 0 and _is_heavy(parquet.metadata)
            if shared or streams:
                parquet = opened(read_dictionary=shared, pre_buffer=not streams, buffer_size=_STREAM_BYTES * streams)
        except OSError as error:
            raise _encrypted(file) if "encrypted" in str(error) else error from None
        yield parquet


def _is_heavy(metadata: pq.FileMetaData) -> bool:
    """Whether a row group holds several rows that are large: what is read ahead of it would be as much as it is."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return any(group.total_byte_size > max(_BATCH_BYTES, group.num_rows * _HEAVY_ROW_BYTES) for group in groups)


def _longest(opened: Callable[..., pq.ParquetFile], texts: list[str]) -> int:
    """Return the bytes of the longest row that the dictionaries of the first row group make; little is read for that."""
    with suppress(OSError, pa.ArrowException, StopIteration):  # reading the rows names what is damaged
        peek = opened(read_dictionary=texts, pre_buffer=False, buffer_size=1 << 16)
        columns = next(peek.iter_batches(1, row_groups=[0], columns=texts, use_threads=False)).columns
        return sum(pc.max(pc.binary_length(column.dictionary)).as_py() or 0 for column in columns)
    return 0


def _encrypted(file: SourceFile) -> DataError:
    return DataError(f"{file.uri}: is encrypted Parquet, whose keys are not read here", next_step="write it without encryption")
