"""How does a rank open its feed of a split?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import torch

from penstock.errors import SpecError
from penstock.ingest.feed.batch import LastBatch
from penstock.ingest.feed.cached import open_cached_feed
from penstock.ingest.feed.cursor import Feed
from penstock.ingest.feed.stream import MemoryFeed, StreamFeed
from penstock.ingest.feed.stream_lanes import LaneFeed
from penstock.ingest.feed.stream_tasks import StreamTables, stream_tasks
from penstock.ingest.materialize.without_disk import MemoryDataset, RowSource
from penstock.ingest.prepare import living_nodes
from penstock.ingest.schema import Split
from penstock.ingest.shuffle.order import Order, ShardRows, make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.training.job import TrainJob

__all__ = ["MemoryFeeds", "StreamFeeds", "open_job_feed"]


def open_job_feed(job: TrainJob, split: Split, rank: int, world_size: int, device: torch.device) -> Feed:
    """Open this rank's feed of a split, with batches on `device`: the train split in the job's order, others as stored."""
    feed = (job.open_feeds or _open_cached)(job, split, rank, world_size)
    feed.deliver_to(device)
    return feed


def _open_cached(job: TrainJob, split: Split, rank: int, world_size: int) -> Feed:
    order = _order(job, split)
    if split != "train" and 1 < world_size <= order.rows and order.by_length is None:
        # Each rank measures a stretch of the split, and its node fetches those shards alone; sums are over all rows.
        shards = ShardRows.of(job.manifest.opened(job.data_storage).shards_of(split).rows)
        order = Order(version=2, mode="none", rows=order.rows, shards=shards, lanes=world_size)
    return open_cached_feed(
        [(job.data_storage, job.manifest)],
        split,
        batch_rows=job.spec.batch_rows,
        order=order,
        rank=rank,
        world_size=world_size,
        last=_last(job, split),
    )


@dataclass(frozen=True)
class MemoryFeeds:
    """Opens feeds of rows in Ray's object store (`cache: memory`)."""

    datasets: Mapping[Split, MemoryDataset]

    def __call__(self, job: TrainJob, split: Split, rank: int, world_size: int) -> Feed:
        """Open a rank's feed; in any process of the Ray cluster that holds the rows."""
        order, batch_rows = _order(job, split), job.spec.batch_rows
        return MemoryFeed(
            self.datasets[split], batch_rows=batch_rows, order=order, rank=rank, world_size=world_size, last=_last(job, split)
        )


@dataclass(frozen=True)
class StreamFeeds:
    """Opens feeds that prepare their rows in each epoch (`cache: none`)."""

    source: RowSource
    shared: Any = None
    """The actor of `share_streams`, if several ranks read."""

    def __call__(self, job: TrainJob, split: Split, rank: int, world_size: int) -> Feed:
        """Open a rank's feed; in any process connected to Ray."""
        free_cpus = ray.cluster_resources().get("CPU", 0.0) - world_size * job.spec.cpus_per_worker
        units, where = self.source.units(job.manifest, split), self.source.where
        row_bytes = sum(unit.size_bytes for unit in units) / max(1, sum(unit.rows for unit in units))
        order = _order(job, split)
        tables = StreamTables(
            units,
            partial(self.source.tables, split),
            rows=[unit.rows for unit in units],
            table_bytes=max(1, int(row_bytes * self.source.preparation.rows_at_once)),
            unit_bytes=[unit.size_bytes for unit in units],
            tasks=stream_tasks(free_cpus, where, living_nodes()),
            where=where,
            # A function reads as many epochs as it likes.
            epochs=job.spec.epochs if split == "train" and job.spec.loop is None else 0,
            shared=None if self.shared is None else (self.shared, f"{job.run_storage.root}/{split}"),
            rank=rank,
            world_size=world_size,
        )
        schema, content = job.manifest.feed_schema, job.manifest.content_digest
        options: dict[str, Any] = {"content": content, "batch_rows": job.spec.batch_rows, "order": order}
        if order.lanes > 1:
            return LaneFeed(tables, schema, split, **options)
        return StreamFeed(tables, schema, split, rank=rank, world_size=world_size, **options)


def _last(job: TrainJob, split: Split) -> LastBatch:
    return job.spec.last_batch if split == "train" else "keep"


def _order(job: TrainJob, split: Split) -> Order:
    if split == "train":
        rows, lanes = job.spec.batch_rows, job.order.lanes
        if job.spec.loop is not None and job.spec.workers > 1 and rows % lanes:
            raise SpecError(
                f"shuffle.lanes is {lanes}, which does not divide the {rows} rows of a batch on {job.spec.workers} workers: "
                "they would get batches of other sizes",
                next_step="leave shuffle.lanes out, or ask for another batch_size (iter_rows asks for a row a worker)",
            )
        return job.order
    # As stored, within the size limit of a step: a batch too large to learn is too large to predict.
    return make_order(ShuffleSpec(mode="none", by_length=job.order.by_length), job.manifest.rows[split])
