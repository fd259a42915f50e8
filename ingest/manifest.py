"""What describes a cached dataset? A small JSON manifest of its shards, which every later stage reads."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from penstock.config import Section
from penstock.ingest.schema import FeedSchema, Split

__all__ = ["UNIT_RECORD", "DatasetManifest", "ShardInfo", "UnitInfo", "manifest_path", "unit_path"]

UNIT_RECORD = "unit.json"
"""Commits a unit, in its folder. Without it the unit's shards are not valid, and the pipeline makes them again."""


class ShardInfo(Section):
    """One Arrow IPC file that holds one record batch."""

    path: str
    """Relative to the storage root."""
    split: Split
    rows: int
    size_bytes: int
    digest: str
    """BLAKE3 of the file (penstock.digest.file_digest)."""
    unit: str
    """Key of the commit unit that made it."""


class UnitInfo(Section):
    """One commit unit: source files whose rows were prepared and committed together."""

    key: str
    files: tuple[str, ...]
    rows_read: int
    rows_dropped: int = 0
    """Rows left out under `data.invalid: drop` or `quarantine`, or by map_batches."""


class DatasetManifest(Section):
    """The manifest of a cached dataset. The dataset exists once its manifest is written."""

    version: Literal[1] = 1
    key: str
    """The materialize stage's key."""
    feed_schema: FeedSchema
    rows: dict[Split, int]
    shards: tuple[ShardInfo, ...]
    """In row order: the rows of a split are the rows of its shards, one after the other."""
    units: tuple[UnitInfo, ...]
    content_digest: str
    """Digest over the shards' digests in order."""
    split_digests: dict[Split, str] = Field(default_factory=dict)
    """Digest over each split's shards."""
    extra: dict[str, Any] = Field(default_factory=dict)

    @property
    def rows_left_out(self) -> str:
        """Count of the rows left out under `data.invalid` or by map_batches, with reasons, as text; empty for none."""
        reasons: dict[str, int] = self.extra.get("dropped", {})
        if not reasons:
            return ""
        return f"{sum(reasons.values()):,} ({', '.join(f'{reason}: {rows:,}' for reason, rows in reasons.items())})"

    @property
    def rows_quarantined(self) -> int:
        """Count of the rows in the quarantine table (penstock.ingest.materialize.quarantine)."""
        return int(self.extra.get("quarantined", 0))

    def shards_of(self, split: Split) -> tuple[ShardInfo, ...]:
        """List the shards of one split, in row order."""
        return tuple(shard for shard in self.shards if shard.split == split)


def manifest_path(key: str) -> str:
    """Return the path of a dataset's manifest, relative to the storage root."""
    return f"datasets/{key}/manifest.json"


def unit_path(key: str, name: str = "") -> str:
    """Return the path of a unit's folder, or of a file in it, relative to the storage root."""
    return f"units/{key}/{name}".rstrip("/")
