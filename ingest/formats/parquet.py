"""How are Parquet files read? Their footer gives schema and row count; damaged pages show up while rows are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import DataError
from penstock.ingest.columns.unreadable import UNREADABLE
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import open_input, read_problem
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.reader import FileFacts, Reader, conform, declared_columns, not_readable, rows_between
from penstock.ingest.spec import DataSpec

__all__ = ["ParquetFormat", "ParquetReader"]


_BATCH_BYTES = 64 << 20
"""Of all columns, decoded at a time."""


class ParquetFormat(Format):
    """Columns with their types; encoded images too, as structs with the field `bytes`."""

    extensions = (".parquet", ".pq", ".parq")

    def reader(self, data: DataSpec, options: None) -> ParquetReader:
        """Read row groups."""
        return ParquetReader()


class ParquetReader(Reader):
    """Parquet files, one row group after the other."""

    inspects_rows = False
    marks_unreadable = True

    def inspect(self, file: SourceFile) -> FileFacts:
        """Read the footer."""
        with _open_parquet(file) as parquet:
            return FileFacts(declared_columns(file, parquet.schema_arrow), parquet.metadata.num_rows)

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows, a batch at a time within each row group."""
        yield from self._rows(file, schema, batch_rows, 0)

    def pieces(self, file: SourceFile, piece_bytes: int) -> list[tuple[int, int]]:
        """Row groups together, up to `piece_bytes` of them as they lie in the file."""
        found: list[tuple[int, int]] = []
        held, first_row, end = 0, 0, 0
        with _open_parquet(file) as parquet:
            for number in range(parquet.num_row_groups):
                group = parquet.metadata.row_group(number)
                size = sum(group.column(index).total_compressed_size for index in range(group.num_columns))
                if held and held + size > piece_bytes:
                    found.append((first_row, end))
                    held, first_row = 0, end
                held, end = held + size, end + group.num_rows
        return [*found, (first_row, end)] if end > first_row else found

    def piece(self, file: SourceFile, schema: pa.Schema, batch_rows: int, first_row: int, end: int) -> Iterator[pa.Table]:
        """Begin at the row group that holds the row."""
        starts = self._group_starts(file)
        at_row = max(start for start in starts if start <= first_row)
        yield from rows_between(self._rows(file, schema, batch_rows, at_row), at_row, first_row, end)

    def _group_starts(self, file: SourceFile) -> list[int]:
        with _open_parquet(file) as parquet:
            sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
        return [0, *accumulate(sizes)]

    def _rows(self, file: SourceFile, schema: pa.Schema, batch_rows: int, begin: int) -> Iterator[pa.Table]:
        """The rows of the row groups that begin at row `begin` and after it."""
        end = 0
        names = [name for name in schema.names if name != UNREADABLE]
        with _open_parquet(file) as parquet:
            for group in range(parquet.num_row_groups):
                start, rows = end, parquet.metadata.row_group(group).num_rows
                end += rows
                if start < begin:
                    continue
                first_row = start
                row_bytes = max(1, parquet.metadata.row_group(group).total_byte_size // max(1, rows))
                at_once = max(1, min(batch_rows, _BATCH_BYTES // row_bytes))
                try:
                    for batch in parquet.iter_batches(at_once, row_groups=[group], columns=names, use_threads=False):
                        yield conform(pa.Table.from_batches([batch]), schema, file, first_row)
                        first_row += batch.num_rows
                except (OSError, pa.ArrowException) as error:
                    if "Expected all lists to be of size" in str(error):
                        raise DataError(
                            f"{file.uri}: row group {group} (rows {start} to {start + rows - 1}): a column of fixed-size lists "
                            f"has a null row, which pyarrow cannot read from Parquet ({error})",
                            next_step="write the column as list<...>, or leave it out of data.columns",
                        ) from error
                    cause = read_problem(file.uri, error)
                    raise type(cause)(
                        f"{file.uri}: row group {group} (rows {start} to {start + rows - 1}) cannot be read: {error}",
                        next_step="the file is damaged: write it again or restore it",
                    ) from error


@contextmanager
def _open_parquet(file: SourceFile) -> Iterator[pq.ParquetFile]:
    try:
        source = open_input(file.uri)
    except OSError as error:
        raise read_problem(file.uri, error) from error
    with source:
        try:
            # INT96, the times of older Spark and Impala, would else be nanoseconds, of which 9999-12-31 wraps to 1816.
            parquet = pq.ParquetFile(source, pre_buffer=True, page_checksum_verification=True, coerce_int96_timestamp_unit="us")
        except (OSError, pa.ArrowException) as error:
            raise not_readable(file, "Parquet", error) from error
        yield parquet
