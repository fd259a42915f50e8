"""Which rows of the source are held out? Read again as the source has them: for what looks at values before `preprocess`."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from penstock.ingest.preprocess.chain import rows_at_once, split_rows
from penstock.ingest.preprocess.problems import Origin
from penstock.ingest.schema import Split
from penstock.tasks.context import RunContext

__all__ = ["location_of", "raw_rows"]


def location_of(ctx: RunContext, split: Split) -> str:
    """Where the files of a split lie: it has a place of its own, or is a part of the train rows."""
    return split if isinstance(getattr(ctx.project.spec.data, split), str) else "train"


def raw_rows(ctx: RunContext, split: Split) -> Iterator[tuple[pa.Table, Origin]]:
    """The rows of a split, with their label, in the columns that the preprocess steps begin with; and their places."""
    data, snapshot = ctx.project.spec.data, ctx.snapshot
    files = [file for file in snapshot.files if file.location == location_of(ctx, split)]
    schema = snapshot.arrow_schema()
    at_once = rows_at_once(data, schema, ctx.project.spec.preprocess)
    rows = split_rows(data, snapshot, files, at_once)
    return ((table, origin) for of, table, origin in rows if of == split and origin.unreadable is None)
