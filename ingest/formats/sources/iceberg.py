"""How is an Iceberg table read? At one snapshot, through its catalog or its metadata file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.formats.arrow import ArrowReader
from penstock.ingest.formats.format import Format, Origin
from penstock.ingest.formats.library import library
from penstock.ingest.formats.sources.naming import address_of, naming
from penstock.ingest.spec import DataSpec

__all__ = ["IcebergFormat", "IcebergOptions"]


class IcebergOptions(Section):
    """Which state of an Iceberg table is read. `data.train` is `namespace.table`, or the URL of a `.metadata.json`.

    Secrets of a catalog are read from the environment or its file, as pyiceberg does: PYICEBERG_CATALOG__NAME__TOKEN.
    """

    catalog: str = "default"
    """The catalog's name."""
    properties: dict[str, str] = Field(default_factory=dict)
    """Of the catalog, such as `{type: rest, uri: "https://catalog.example.org"}`."""
    snapshot: int | None = None
    """The snapshot's id; without it the current one, as it is when a run begins."""


class IcebergFormat(Format):
    """An Iceberg table at one snapshot, which is part of the key; its rows are copied to the storage once."""

    extensions = (".arrow",)
    is_kept = True
    pins = ("snapshot",)
    folder_columns = False
    Options = IcebergOptions

    def origin(self, data: DataSpec, target: str, base_dir: Path) -> Origin:
        """The table, known by its id, snapshot and schema."""
        options: IcebergOptions = data.__dict__["iceberg"]
        with naming("Iceberg table", target):
            table = _table(target, options, base_dir)
            snapshot = options.snapshot if options.snapshot is not None else _current(table, target)
            scan = table.scan(snapshot_id=options.snapshot)
            identity = ["iceberg", str(table.metadata.table_uuid), snapshot, str(scan.projection())]
        rows = lambda: scan.to_arrow_batch_reader()  # noqa: E731 - opens the table's files, so not before it is called
        return Origin(identity, rows, f"snapshot-{snapshot}", lambda: naming("Iceberg table", target))

    def reader(self, data: DataSpec, options: IcebergOptions) -> ArrowReader:
        """Read the files that the rows were written to."""
        return ArrowReader()


def _table(target: str, options: IcebergOptions, base_dir: Path) -> Any:
    if target.endswith(".metadata.json"):
        table = library("pyiceberg.table", "iceberg", "iceberg").StaticTable
        return table.from_metadata(address_of(target, base_dir), properties=options.properties)
    catalog = library("pyiceberg.catalog", "iceberg", "iceberg").load_catalog(options.catalog, **options.properties)
    return catalog.load_table(target)


def _current(table: Any, target: str) -> int:
    snapshot = table.current_snapshot()
    if snapshot is None:
        raise DataError(f"{target}: the table has no snapshot, and so no rows", next_step="write some rows to it")
    return int(snapshot.snapshot_id)
