"""How are the rows of a run described as tables? CSV, which MLflow's page shows as a table."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import csv

from penstock.ingest.preprocess.transform_spec import FittedPreprocess
from penstock.ingest.schema import SPLITS
from penstock.tasks.records.data import RunData

__all__ = ["as_csv", "data_tables", "dataset_name", "split_profile"]

MAX_FILES = 10_000
"""Of more source files, so many are listed."""

_VALUES_SHOWN = 10


def as_csv(table: pa.Table) -> str:
    """The table as CSV, with a line of names."""
    into = io.BytesIO()
    csv.write_csv(table, into)
    return into.getvalue().decode()


def data_tables(data: RunData, fitted: FittedPreprocess) -> dict[str, str]:
    """File name -> CSV: the source's files, rows by split and class, the source's columns, and what was fitted."""
    tables = {
        "data/files.csv": list(_files(data)),
        "data/rows.csv": list(_rows(data)),
        "data/columns.csv": list(_columns(data)),
        "data/fitted.csv": list(_fitted(fitted)),
    }
    return {name: _csv(rows) for name, rows in tables.items() if rows}


def dataset_name(pipeline: str, split: str) -> str:
    """Name of a split's rows at the tracker."""
    return f"{pipeline} {split}"


def split_profile(data: RunData, split: str) -> dict[str, Any]:
    """Describe a split's rows for a tracker's page: classes, files and bytes."""
    own = [file for name, file in data.files.items() if name.startswith(f"{split}/")]
    found = own or list(data.files.values())  # a fraction of the training files
    classes = data.class_rows().get(split)
    files = {"files": len(found), "bytes": sum(file["bytes"] for file in found)}
    return {**({"classes": classes} if classes else {}), **files}


def _files(data: RunData) -> Iterator[dict[str, Any]]:
    classes = data.file_classes()
    for name, file in list(data.files.items())[:MAX_FILES]:
        split, _, inside = name.partition("/")
        found = ", ".join(f"{label} {count:,}" for label, count in classes.get(name, {}).items())
        size = {"rows": file["rows"], "bytes": file["bytes"]}
        yield {"source": split, "file": inside, **size, "digest": file["content"], "classes": found}


def _rows(data: RunData) -> Iterator[dict[str, Any]]:
    rows = data.manifest.rows if data.manifest is not None else {}
    classes = data.class_rows()
    for split in SPLITS:
        if rows.get(split):
            yield {"split": split, "class": "(all)", "rows": rows[split], "share": 1.0}
        for name, count in classes.get(split, {}).items():
            yield {"split": split, "class": name, "rows": count, "share": round(count / max(1, rows.get(split, 0)), 4)}


def _columns(data: RunData) -> Iterator[dict[str, Any]]:
    types = {column.name: column.type for column in data.snapshot.columns} if data.snapshot is not None else {}
    for split in SPLITS:
        known = data.profile.columns.get(split, {})
        for name in types if known else ():
            found = known.get(name)
            entry = {"split": split, "column": name, "type": types[name]}
            if found is None:
                yield {**entry, **dict.fromkeys(("nulls", "mean", "std", "low", "high", "values"))}
                continue
            numbers = ("mean", "std", "low", "high")
            measured = {key: getattr(found, key) if found.count else None for key in numbers}
            values = sorted((found.values or {}).items(), key=lambda item: -item[1])[:_VALUES_SHOWN]
            most = ", ".join(f"{value} {count:,}" for value, count in values)
            yield {**entry, "nulls": found.nulls, **measured, "values": most}


def _fitted(fitted: FittedPreprocess) -> Iterator[dict[str, Any]]:
    for number, each in enumerate(fitted.steps):
        for column in each.columns:
            state = column.model_dump(exclude_none=True, exclude={"column", "more"}) | (column.more or {})
            for name, value in state.items():
                entry = {"step": number, "transform": each.step.kind, "column": column.column, "statistic": name}
                listed = list(value) if isinstance(value, (tuple, list)) else [value]
                more = f" and {len(listed) - _VALUES_SHOWN:,} more" if len(listed) > _VALUES_SHOWN else ""
                yield {**entry, "value": ", ".join(map(str, listed[:_VALUES_SHOWN])) + more}


def _csv(rows: list[dict[str, Any]]) -> str:
    return as_csv(pa.Table.from_pylist(rows))
