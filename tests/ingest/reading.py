"""Small sources on disk, and one way to read them from end to end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.ingest.files.listing import SourceFile, list_source
from penstock.ingest.formats.registry import format_of
from penstock.ingest.formats.section import spec_class_for
from penstock.ingest.read.snapshot import SourceSnapshot, iterate_rows, read_source
from penstock.ingest.read.strata import with_strata
from penstock.ingest.spec import DataSpec
from penstock.progress import silent

__all__ = ["copies_kept", "listed", "read_rows", "read_snapshot", "write_files"]


def write_files(folder: Path, files: Mapping[str, str | bytes | pa.Table]) -> Path:
    """Write text, bytes or tables (as Parquet) below `folder`, and return it."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, pa.Table):
            pq.write_table(content, path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def listed(data: DataSpec, folder: Path) -> list[SourceFile]:
    """The files of `data`, whose paths start at `folder`."""
    return list_source(data, folder, format_of(data).extensions).files


def read_snapshot(folder: Path, format: str, **options: Any) -> tuple[DataSpec, SourceSnapshot]:
    """List and check the files of `folder`, or of `train=` below it."""
    section = {"format": format, "train": ".", **options}
    data = spec_class_for(section).model_validate(section)
    return data, with_strata(data, read_source(data, listed(data, folder), silent))


def read_rows(folder: Path, format: str, batch_rows: int = 4096, **options: Any) -> pa.Table:
    """All rows of the source, in order; those of copies that the first look keeps are the same ones."""
    data, snapshot = read_snapshot(folder, format, **options)
    tables = list(_tables(data, snapshot, batch_rows))
    assert all(table.schema == snapshot.arrow_schema() for table in tables)
    assert sum(table.num_rows for table in tables) == snapshot.rows
    with copies_kept():
        assert with_strata(data, read_source(data, listed(data, folder), silent, keep=True)) == snapshot
        for table, kept in zip(tables, _tables(data, snapshot, batch_rows), strict=True):
            assert kept.schema == table.schema
            assert kept.nbytes == table.nbytes  # large rows are cut by it
            assert repr(kept.to_pylist()) == repr(table.to_pylist())  # NaN is no NaN
    return pa.concat_tables(tables)


def _tables(data: DataSpec, snapshot: SourceSnapshot, batch_rows: int) -> Iterator[pa.Table]:
    return (batch.table for batch in iterate_rows(data, snapshot, snapshot.files, batch_rows))


@contextmanager
def copies_kept() -> Iterator[Path]:
    """A cache of the block's own for `read_source(keep=True)`: the folder that copies go to."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("penstock.ingest.read.parsed.rows.cache_folder", lambda: Path(folder)),
    ):
        yield Path(folder, "parsed")
