"""Which rows did `data.invalid: quarantine` set aside, and are they within its budget?

The rows of a unit are a Parquet file beside its shards, written before the record that commits the unit; those of a dataset are
a file beside its manifest. A row is listed once, with the first reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import DataError
from penstock.ingest.manifest import manifest_path, unit_path
from penstock.ingest.preprocess.problems import RowProblem, SetAside, joined
from penstock.ingest.schema import Split
from penstock.ingest.spec import QuarantineSpec
from penstock.messages import counted

__all__ = ["FILE_NAME", "check_budget", "dataset_quarantine_path", "join_parts", "unit_quarantine_path", "write_part"]


FILE_NAME = "quarantine.parquet"

_SCHEMA = pa.schema(
    [
        pa.field("location", pa.string(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("column", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("value", pa.string()),
    ]
)
"""`location` is train, validation or test; `file` its path there; `row` counts from 0; `value` is the bad value if known."""


def unit_quarantine_path(key: str) -> str:
    """Return the path of the rows that a unit has set aside."""
    return unit_path(key, FILE_NAME)


def dataset_quarantine_path(key: str) -> str:
    """Return the path of the rows that a dataset has set aside."""
    return f"{Path(manifest_path(key)).parent}/{FILE_NAME}"


def write_part(path: Path, found: Iterable[SetAside], places: dict[str, tuple[Split, str]]) -> None:
    """Write the rows that one unit has set aside, in the order of its files and their rows.

    Args:
        places: URI -> (location, name) of each of the unit's files.
    """
    order = {uri: number for number, uri in enumerate(places)}
    rows = [
        (order[uri := each.origin.names[file]], row, *places[uri], each.column, each.reason, example)
        for each in found
        for file, row, example in zip(each.origin.files.tolist(), each.origin.rows.tolist(), each.examples, strict=True)
    ]
    rows.sort(key=lambda row: row[:2])
    records = [
        dict(zip(_SCHEMA.names, (location, name, row, column, reason, example or None), strict=True))
        for _, row, location, name, column, reason, example in rows
    ]
    pq.write_table(pa.Table.from_pylist(records, schema=_SCHEMA), path)


def join_parts(path: Path, parts: Sequence[Callable[[], bytes]]) -> None:
    """Write the rows of several units, in their order, one unit at a time in memory."""
    with pq.ParquetWriter(path, _SCHEMA) as writer:
        for read in parts:
            writer.write_table(pq.read_table(pa.BufferReader(read())))


def check_budget(budget: QuarantineSpec, found: Sequence[RowProblem], rows: int) -> None:
    """Raise DataError, with the first row and the count of each reason, if more rows are set aside than allowed.

    Args:
        found: the problems of all units so far, in row order.
        rows: of all files.
    """
    problems = joined(found)
    count = sum(problem.rows for problem in problems)
    if count <= budget.limit(rows):
        return
    limits = [f"max_fraction: {budget.max_fraction:g} of {rows:,} rows"]
    limits += [] if budget.max_rows is None else [f"max_rows: {budget.max_rows:,}"]
    raise DataError(
        f"data.invalid: quarantine: {counted(count, 'row')} or more cannot be used, and data.quarantine allows "
        f"{budget.limit(rows):,} ({', '.join(limits)})",
        problems=[str(problem) for problem in problems],
        next_step="repair the source, or allow more (data.quarantine: {max_fraction: ...}); good units are kept",
    )
