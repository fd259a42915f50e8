"""How are Parquet and Arrow files read? Their footers give schema and row count; damaged pages show up while rows are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from penstock.errors import DataError
from penstock.ingest.access import open_input, read_problem
from penstock.ingest.arrow_types import canonical_type
from penstock.ingest.reader import FileFacts, conform, looks_like
from penstock.ingest.source import SourceFile

__all__ = ["ArrowReader", "ParquetReader"]


class ParquetReader:
    """Parquet files, one row group after the other."""

    one_row_per_file = False
    missing_is_null = False

    def inspect(self, file: SourceFile) -> FileFacts:
        """Read the footer."""
        with _open_parquet(file) as parquet:
            return FileFacts(_columns_of(file, parquet.schema_arrow), parquet.metadata.num_rows)

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows, a batch at a time within each row group."""
        first_row = 0
        with _open_parquet(file) as parquet:
            for group in range(parquet.num_row_groups):
                start, rows = first_row, parquet.metadata.row_group(group).num_rows
                try:
                    for batch in parquet.iter_batches(batch_rows, row_groups=[group], columns=schema.names, use_threads=False):
                        yield conform(pa.Table.from_batches([batch]), schema, file, first_row)
                        first_row += batch.num_rows
                except (OSError, pa.ArrowException) as error:
                    cause = read_problem(file.uri, error)
                    raise type(cause)(
                        f"{file.uri}: row group {group} (rows {start} to {start + rows - 1}) cannot be read: {error}",
                        next_step="the file is damaged: write it again or restore it",
                    ) from error

    def misfit(self, file: SourceFile, column: str, kind: pa.DataType) -> str:
        """Types are declared, not found: there is no first row to name."""
        return ""


class ArrowReader:
    """Arrow IPC files and streams, Feather version 2 among them."""

    one_row_per_file = False
    missing_is_null = False

    def inspect(self, file: SourceFile) -> FileFacts:
        """Read every batch, since only the batches know their row counts."""
        with _open_arrow(file) as (schema, batches):
            return FileFacts(_columns_of(file, schema), sum(batch.num_rows for batch in batches))

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows, a record batch at a time."""
        first_row = 0
        with _open_arrow(file) as (_, batches):
            for batch in batches:
                yield conform(pa.Table.from_batches([batch]), schema, file, first_row)
                first_row += batch.num_rows

    def misfit(self, file: SourceFile, column: str, kind: pa.DataType) -> str:
        """Types are declared, not found: there is no first row to name."""
        return ""


@contextmanager
def _open_parquet(file: SourceFile) -> Iterator[pq.ParquetFile]:
    try:
        source = open_input(file.uri)
    except OSError as error:
        raise read_problem(file.uri, error) from error
    with source:
        try:
            parquet = pq.ParquetFile(source, pre_buffer=True, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise _not_readable(file, "Parquet", error) from error
        yield parquet


@contextmanager
def _open_arrow(file: SourceFile) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    try:
        with open_input(file.uri) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            if is_file:
                reader = ipc.open_file(source)
                yield reader.schema, (reader.get_batch(index) for index in range(reader.num_record_batches))
            else:
                stream = ipc.open_stream(source)
                yield stream.schema, iter(stream)
    except (OSError, pa.ArrowException) as error:
        raise _not_readable(file, "Arrow", error) from error


def _not_readable(file: SourceFile, format: str, error: Exception) -> Exception:
    known = read_problem(file.uri, error)
    if not isinstance(known, DataError):
        return known
    what = looks_like(file)
    if what.startswith(("a Parquet", "an Arrow")) and format in what:
        return DataError(
            f"{file.uri}: cut off or damaged: it begins as {what} and cannot be read to its end ({error})", next_step=_AGAIN
        )
    if what:
        return DataError(f"{file.uri}: this is {what}, not {format}", next_step=_AGAIN)
    return DataError(f"{file.uri}: not a {format} file, or damaged ({' '.join(str(error).split())})", next_step=_AGAIN)


_AGAIN = "write or fetch the file again, or leave it out with a glob (data.train: .../part-*)"


def _columns_of(file: SourceFile, schema: pa.Schema) -> dict[str, pa.DataType]:
    repeated = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if repeated:
        raise DataError(f"{file.uri}: column {repeated[0]!r} is there twice")
    return {field.name: canonical_type(field.type) for field in schema}
