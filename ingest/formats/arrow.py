"""How are Arrow IPC files, streams and Feather files read?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.ipc as ipc

from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import open_input
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.reader import FileFacts, Reader, conform, declared_columns, not_readable
from penstock.ingest.spec import DataSpec

__all__ = ["ArrowFormat", "ArrowReader"]


class ArrowFormat(Format):
    """IPC files and streams, Feather version 2 among them."""

    extensions = (".arrow", ".arrows", ".feather", ".ipc")

    def reader(self, data: DataSpec, options: None) -> ArrowReader:
        """Read record batches."""
        return ArrowReader()


class ArrowReader(Reader):
    """Arrow IPC files and streams, Feather version 2 among them."""

    marks_unreadable = True

    def inspect(self, file: SourceFile) -> FileFacts:
        """Read every batch, since only the batches know their row counts."""
        with _open_arrow(file) as (schema, batches):
            return FileFacts(declared_columns(file, schema), sum(batch.num_rows for batch in batches))

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows, a record batch at a time."""
        first_row = 0
        with _open_arrow(file) as (_, batches):
            for batch in batches:
                yield conform(pa.Table.from_batches([batch]), schema, file, first_row)
                first_row += batch.num_rows


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
        raise not_readable(file, "Arrow", error) from error
