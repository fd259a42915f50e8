"""How are ORC files read? Their footer gives schema and row count; rows come a stripe at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from pyarrow import orc

from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import open_input
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.reader import FileFacts, Reader, conform, declared_columns, reading
from penstock.ingest.spec import DataSpec

__all__ = ["OrcFormat", "OrcReader"]


class OrcFormat(Format):
    """Columns with their types, as Hive and Spark write them."""

    extensions = (".orc",)

    def reader(self, data: DataSpec, options: None) -> OrcReader:
        """Read stripes."""
        return OrcReader()


class OrcReader(Reader):
    """ORC files, one stripe after the other."""

    def inspect(self, file: SourceFile) -> FileFacts:
        """Read the footer."""
        with _opened(file) as found:
            return FileFacts(declared_columns(file, found.schema), found.nrows)

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows, a stripe at a time."""
        first_row = 0
        with _opened(file) as found:
            for number in range(found.nstripes):
                batch = found.read_stripe(number, columns=schema.names)
                table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
                yield conform(table, schema, file, first_row)
                first_row += table.num_rows


@contextmanager
def _opened(file: SourceFile) -> Iterator[orc.ORCFile]:
    with reading(file, "ORC"), open_input(file.uri) as source:
        yield orc.ORCFile(source)
