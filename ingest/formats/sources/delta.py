"""How is a Delta table read? At one version, by its log, which lists the files that count.

A table that is nothing but Parquet files is read as it lies, by every worker, and no row is written a second time: if each file
has its columns with their types, and if the columns that a file lacks are in the folders' names. Any other is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import NonNegativeInt

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.casts import canonical_type
from penstock.ingest.columns.type_text import type_text
from penstock.ingest.files.listing import SourceFile, TableFiles, values_in_folders
from penstock.ingest.files.opening import open_input
from penstock.ingest.formats.arrow import ArrowReader
from penstock.ingest.formats.format import Format, Origin
from penstock.ingest.formats.parquet import ParquetReader
from penstock.ingest.formats.reader import FileFacts, Reader, library
from penstock.ingest.formats.sources.tables import address_of, naming
from penstock.ingest.spec import DataSpec
from penstock.stores import object_store_options

__all__ = ["DeltaFormat", "DeltaOptions"]


_LOOKS = 16
"""Footers that are read at the same time."""

_FROM_TEXT: tuple[Callable[[pa.DataType], bool], ...] = (pa.types.is_string, pa.types.is_integer, pa.types.is_date32)
"""Types whose values in folders' names read alike everywhere."""


class DeltaOptions(Section):
    """Which state of a Delta table is read. `data.train` is the table's folder or URL."""

    version: NonNegativeInt | None = None
    """The version; without it the newest one, as it is when a run begins."""


class DeltaFormat(Format):
    """A Delta table at one version; its Parquet files are read as they are, or else its rows copied to the storage once."""

    extensions = (".arrow",)
    is_kept = True
    pins = ("version",)
    Options = DeltaOptions

    def origin(self, data: DataSpec, target: str, base_dir: Path) -> Origin:
        """Return the table, known by its id and version, at any place."""
        deltalake = library("deltalake", "delta", "delta")
        uri, wanted = address_of(target, base_dir), data.__dict__["delta"].version
        with naming("Delta table", uri):
            try:
                table = _table(uri, wanted)
            except deltalake.exceptions.TableNotFoundError as error:
                raise DataError(f"{uri}: there is no Delta table", next_step="correct the location, or data.format") from error
            version = table.version()
            identity = ["delta", str(table.metadata().id), version]
        return Origin(
            identity,
            lambda: _batches(table) if _holds_its_rows(table) else _scanned(table),
            f"version-{version}",
            lambda: naming("Delta table", uri),
            lambda: _files(table, uri),
        )

    def reader(self, data: DataSpec, options: DeltaOptions) -> TableReader:
        """Read the table's files, or those that its rows were written to."""
        return TableReader()


def _files(table: Any, uri: str) -> TableFiles | None:
    if table.protocol().min_reader_version > 1:  # deleted rows, renamed columns
        return None
    added = pa.table(table.get_add_actions(flatten=True))
    values = {
        name: pc.cast(added.column(f"partition.{name}"), pa.string()).to_pylist() for name in table.metadata().partition_columns
    }
    paths = added.column("path").to_pylist()
    if any("://" in path or path.startswith("/") for path in paths):  # those of a table that this one was cloned from
        return None
    names = [unquote(path) for path in paths]  # the log has them as parts of a URL
    return plain_files(uri.rstrip("/"), names, table.to_pyarrow_dataset().schema, values)


def _holds_its_rows(table: Any) -> bool:
    """Whether its files have all rows of the table and no others, under its columns' names: nothing is deleted or renamed."""
    protocol = table.protocol()
    return protocol.min_reader_version == 1 or (  # 2 may mean renamed columns, which pyarrow reads as nulls
        protocol.min_reader_version == 3 and {*(protocol.reader_features or ())} <= {"timestampNtz"}
    )


def _scanned(table: Any) -> pa.RecordBatchReader:
    """Read the rows by the library's own engine, which reads all that the protocol allows, in an order of its own."""
    schema = pa.schema(table.schema().to_arrow())
    return pa.RecordBatchReader.from_stream(table.scan()).cast(schema)


def _batches(table: Any) -> Iterator[pa.RecordBatch]:
    dataset = table.to_pyarrow_dataset()
    # By name: the log's own order differs from one reading to the next.
    for fragment in sorted(dataset.get_fragments(), key=lambda fragment: fragment.path):
        yield from fragment.to_batches(schema=dataset.schema)


def _table(uri: str, version: int | None) -> Any:
    deltalake = library("deltalake", "delta", "delta")
    return deltalake.DeltaTable(uri, version=version, storage_options=object_store_options(uri))


def plain_files(
    root: str, names: Sequence[str], schema: pa.Schema, partitions: Mapping[str, list[str | None]]
) -> TableFiles | None:
    """Return the table as files, or None if it is more than that; reads their footers.

    Args:
        names: of its files, below `root`.
        partitions: column -> its value in each file as text, for the columns that the files lack.
    """
    kinds = {field.name: _kind(field.type) for field in schema if field.name not in partitions}
    apart = {name: canonical_type(schema.field(name).type) for name in partitions}
    if not names or not all(any(test(kind) for test in _FROM_TEXT) for kind in apart.values()):
        return None
    for number, name in enumerate(names):
        if values_in_folders(name) != {column: values[number] for column, values in partitions.items()}:
            return None

    def is_alike(name: str) -> bool:
        with open_input(f"{root}/{name}") as stream:
            found = pq.read_schema(stream)
        return {field.name: _kind(field.type) for field in found} == kinds

    with ThreadPoolExecutor(_LOOKS) as pool:
        try:
            if not all(pool.map(is_alike, names)):
                return None
        except Exception:  # what cannot be opened so may be opened by the table's library, which has settings of its own
            return None
    return TableFiles(root=root, names=tuple(names), types={name: type_text(kind) for name, kind in apart.items()})


def _kind(kind: pa.DataType) -> str:
    """Name a type without the width of its offsets, 32 or 64 bits, which a table does not know."""
    return str(canonical_type(kind)).replace("large_", "")


class TableReader(Reader):
    """The files of a table, or the Arrow files that its rows were written to."""

    marks_unreadable = True

    def __init__(self) -> None:
        self._arrow, self._parquet = ArrowReader(), ParquetReader()

    def _of(self, file: SourceFile) -> Reader:
        return self._arrow if file.name.endswith(".arrow") else self._parquet

    def inspect(self, file: SourceFile) -> FileFacts:
        """Read the footer, or every batch."""
        return self._of(file).inspect(file)

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows."""
        return self._of(file).tables(file, schema, batch_rows)

    def pieces(self, file: SourceFile, piece_bytes: int) -> list[tuple[int, int]]:
        """Row groups, or batches."""
        return self._of(file).pieces(file, piece_bytes)

    def piece(self, file: SourceFile, schema: pa.Schema, batch_rows: int, first_row: int, end: int) -> Iterator[pa.Table]:
        """Yield some of the rows."""
        return self._of(file).piece(file, schema, batch_rows, first_row, end)
