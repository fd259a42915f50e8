"""How is a Delta table read? At one version, by its log, which lists the files that count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import NonNegativeInt

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.formats.reader import library
from penstock.ingest.formats.sources.kept import KeptFormat, Origin
from penstock.ingest.formats.sources.table_files import TableFiles, plain_files
from penstock.ingest.formats.sources.tables import address_of, naming, object_store_options
from penstock.ingest.spec import DataSpec

__all__ = ["DeltaFormat", "DeltaOptions"]


class DeltaOptions(Section):
    """Which state of a Delta table is read. `data.train` is the table's folder or URL."""

    version: NonNegativeInt | None = None
    """The version; without it the newest one, as it is when a run begins."""


class DeltaFormat(KeptFormat):
    """A Delta table at one version; its Parquet files are read as they are, or else its rows copied to the storage once."""

    pins = ("version",)
    Options = DeltaOptions

    def origin(self, data: DataSpec, target: str, base_dir: Path, code_files: Sequence[str]) -> Origin:
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
