"""Keep one rank's rows of the first epoch in memory, for `materialize()` of a shard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch

from penstock.errors import SpecError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.feed.page_advice import free_memory
from penstock.ingest.schema import FeedSchema

__all__ = ["GivesBatches", "OpenFeed", "kept_rows"]


class GivesBatches(Protocol):
    """The part of a feed that a shard uses."""

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterate as `penstock.ingest.feed.batch.Feed` does."""


OpenFeed = Callable[[int, torch.device], GivesBatches]
"""(rows of a global batch, device) -> this rank's batches."""


def kept_rows(name: str, schema: FeedSchema, rows: int, shares: int, open_feed: OpenFeed) -> OpenFeed:
    """Read this rank's rows of the first epoch, and open feeds of them.

    Args:
        name: of the shard, for messages.
        rows: of an epoch, of all ranks that share them.

    Raises:
        SpecError: they take more than half of the memory that is free, or a column packs rows of several lengths.
    """
    packed = [column.name for column in schema.columns if column.ragged == "packed"]
    if packed:
        raise SpecError(
            f"the shard {name!r}: materialize() keeps rows, and {packed[0]!r} is packed: a batch is one tensor",
            next_step="iterate over the shard itself",
        )
    row_bytes = sum(
        np.dtype(column.dtype).itemsize * math.prod(column.shape) for column in schema.columns if column.ragged is None
    )
    own, free = -(-rows // shares), free_memory()
    if own * row_bytes > free // 2:
        raise SpecError(
            f"the shard {name!r}: materialize() would keep {own:,} rows of {row_bytes:,} bytes, "
            f"{own * row_bytes / 1e9:,.1f} GB; it may take half of the {free / 1e9:,.1f} GB of free memory",
            next_step="iterate over the shard itself: its rows are prepared and prefetched already",
        )
    kept = next(open_feed(-(-rows // shares) * shares, torch.device("cpu")).batches(0))
    return lambda batch_rows, device: _KeptRows(kept, rows, shares, batch_rows, device)


class _KeptRows:
    def __init__(self, kept: Batch, rows: int, shares: int, batch_rows: int, device: torch.device) -> None:
        self._kept, self._rows, self._shares, self._batch_rows, self._device = kept, rows, shares, batch_rows, device

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for position in range(start, self._rows, self._batch_rows):
            end = min(position + self._batch_rows, self._rows)
            own = slice(position // self._shares, end // self._shares if end < self._rows else self._kept.rows)
            columns = {name: values[own].to(self._device, copy=True) for name, values in self._kept.columns.items()}
            ids = self._kept.row_ids[own]
            yield Batch(columns, ids, len(ids), end - position, self._kept.first_row + own.start, end)
