"""How is an Iceberg table read? At one snapshot, through its catalog or its metadata file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.formats.reader import library
from penstock.ingest.formats.sources.kept import KeptFormat, Origin
from penstock.ingest.formats.sources.table_files import TableFiles, plain_files
from penstock.ingest.formats.sources.tables import address_of, naming
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


class IcebergFormat(KeptFormat):
    """An Iceberg table at one snapshot; its Parquet files are read as they are, or else its rows copied to the storage once."""

    pins = ("snapshot",)
    folder_columns = False
    Options = IcebergOptions

    def origin(self, data: DataSpec, target: str, base_dir: Path, code_files: Sequence[str]) -> Origin:
        """Return the table, known by its id, snapshot and schema."""
        options: IcebergOptions = data.__dict__["iceberg"]
        with naming("Iceberg table", target):
            table = _table(target, options, base_dir)
            snapshot = options.snapshot if options.snapshot is not None else _current(table, target)
            scan = table.scan(snapshot_id=options.snapshot)
            identity = ["iceberg", str(table.metadata.table_uuid), snapshot, str(scan.projection())]
        rows = lambda: scan.to_arrow_batch_reader()  # noqa: E731 - opens the table's files, so not before it is called
        return Origin(
            identity, rows, f"snapshot-{snapshot}", lambda: naming("Iceberg table", target), lambda: _files(table, scan)
        )


def _files(table: Any, scan: Any) -> TableFiles | None:
    root, tasks = table.location().rstrip("/"), list(scan.plan_files())
    paths = [task.file.file_path for task in tasks]
    if any(task.delete_files or task.file.file_format.value != "PARQUET" for task in tasks):
        return None
    if not all(path.startswith(f"{root}/") for path in paths):
        return None
    projected = scan.projection()
    arrow = library("pyiceberg.io.pyarrow", "iceberg", "iceberg").schema_to_pyarrow(projected)
    names = [path.removeprefix(f"{root}/") for path in paths]
    return plain_files(root.removeprefix("file://"), names, arrow, {}, by_id=True)


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
