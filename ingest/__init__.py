"""Data: sources, transforms, cached datasets, sample order and the feed. Plain Python and Ray; no Prefect, no MLflow.

For programs of your own: `from penstock.ingest import open_feed, FeedDataset` (docs/feed.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.ingest.public import FeedDataset, open_feed

__all__ = ["FeedDataset", "open_feed"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: torch takes a second, and reading a pipeline file should not.
    if name in __all__:
        from penstock.ingest import public

        return getattr(public, name)
    raise AttributeError(f"module 'ingest' has no attribute {name!r}")
