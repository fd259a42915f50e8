"""How are Arrow IPC files, streams and Feather files read?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import pyarrow as pa
import pyarrow.ipc as ipc

from penstock.ingest.files.listing import Cut, SourceFile
from penstock.ingest.files.opening import open_input
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.reader import (
    CUT_BYTES,
    FileFacts,
    Reader,
    conform,
    declared_columns,
    last_cut,
    reading,
    rows_between,
)
from penstock.ingest.spec import DataSpec

__all__ = ["ArrowFormat", "ArrowReader"]

_END_MARK = b"\xff\xff\xff\xff\0\0\0\0"


class ArrowFormat(Format):
    """IPC files and streams, Feather version 2 among them."""

    extensions = (".arrow", ".arrows", ".feather", ".ipc")

    def reader(self, data: DataSpec, options: None) -> ArrowReader:
        """Read record batches."""
        return ArrowReader()


class ArrowReader(Reader):
    """Arrow IPC files and streams, Feather version 2 among them."""

    def inspect(self, file: SourceFile) -> FileFacts:
        """Read every batch, since only the batches know their row counts."""
        with _open_arrow(file) as (schema, batches):
            rows, held, cuts = 0, 0, [Cut(0, 0, 1)]
            for number, batch in enumerate(batches):
                if held >= CUT_BYTES:
                    held = 0
                    cuts.append(Cut(rows, number, 1))
                rows, held = rows + batch.num_rows, held + batch.nbytes
        return FileFacts(declared_columns(file, schema), rows, cuts=tuple(cuts) if len(cuts) > 1 else ())

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows, a record batch at a time."""
        yield from _tables(file, schema, Cut(0, 0, 1))

    def piece(self, file: SourceFile, schema: pa.Schema, batch_rows: int, first_row: int, end: int) -> Iterator[pa.Table]:
        """Begin at the last cut before the row."""
        cut = last_cut(file, first_row)
        yield from rows_between(_tables(file, schema, cut), cut.row, first_row, end)


def _tables(file: SourceFile, schema: pa.Schema, begin: Cut) -> Iterator[pa.Table]:
    first_row = begin.row
    with _open_arrow(file, begin.at) as (_, batches):
        for batch in batches:
            yield conform(pa.Table.from_batches([batch]), schema, file, first_row)
            first_row += batch.num_rows


@contextmanager
def _open_arrow(file: SourceFile, first_batch: int = 0) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    with reading(file, "Arrow"), open_input(file.uri) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = ipc.open_file(source)
            yield reader.schema, (reader.get_batch(index) for index in range(first_batch, reader.num_record_batches))
        else:
            stream = ipc.open_stream(source)
            yield stream.schema, islice(_to_its_end(stream, source), first_batch, None)


def _to_its_end(stream: ipc.RecordBatchStreamReader, source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """Yield all batches. Raises ValueError if the stream does not end with its mark and the file: pyarrow passes over both."""
    yield from stream
    end, size = source.tell(), source.size()
    source.seek(0)
    is_marked = source.read(4) == _END_MARK[:4]  # not by Arrow before 0.15
    source.seek(max(0, end - len(_END_MARK)))
    if is_marked and source.read(len(_END_MARK)) != _END_MARK:
        raise ValueError("the stream has no end mark")
    if end != size:
        raise ValueError(f"{size - end} bytes lie behind the stream's end, perhaps another stream")
