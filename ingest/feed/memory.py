"""How does a training worker read rows that lie in Ray's object store (`cache: memory`)?

The same order as from disk, the same exact resume. Blocks live as long as the Ray cluster and the process that put them
there; after a driver restart they are prepared again, and a state continues only if the content is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import ray

from penstock.ingest.columns.arrays import Block
from penstock.ingest.feed.batch import FeedShare, ShareArguments
from penstock.ingest.feed.cached import CachedFeed, select_columns
from penstock.ingest.feed.gather import RowGather
from penstock.ingest.materialize.without_disk import MemoryDataset
from penstock.ingest.phases import phase
from penstock.ingest.shuffle.order import Order

__all__ = ["MemoryFeed"]


class MemoryFeed(CachedFeed):
    """Reads a `MemoryDataset`. Blocks are mapped from the node's object store without a copy; batches are fresh tensors."""

    def __init__(
        self,
        dataset: MemoryDataset,
        *,
        order: Order,
        columns: Sequence[str] | None = None,
        **share: Unpack[ShareArguments],
    ) -> None:
        schema = select_columns(dataset.schema, columns)
        list_bytes = dataset.size_bytes // max(1, dataset.num_rows) if any(column.ragged for column in schema.columns) else 0

        def block(index: int) -> Block:
            with phase("fetch"):  # mapped where the node has it, and brought from another one where not
                found: Block = ray.get(dataset.blocks[index])
            return found

        rows = RowGather(schema.columns, dataset.block_rows, block, list_bytes=list_bytes)
        super().__init__(schema, dataset.split, dataset.content, rows, order, FeedShare(**share))
