"""Which feed does a rank read, and how do its batches reach the rank's device?"""

from __future__ import annotations

import torch
from torch import Tensor

from ingest.dataset import Split
from ingest.feed import Batch, Feed, open_feed
from ingest.order import make_order
from ingest.spec import ShuffleSpec
from training.job import TrainJob

__all__ = ["on_device", "open_job_feed"]


def open_job_feed(job: TrainJob, split: Split, rank: int, world_size: int) -> Feed:
    """Open this rank's feed of a split: the train split in the job's order, held-out splits as stored."""
    if job.open_feeds is not None:
        return job.open_feeds(job, split, rank, world_size)
    order = job.order if split == "train" else make_order(ShuffleSpec(mode="none"), job.manifest.rows[split])
    return open_feed(
        job.data_storage,
        job.manifest,
        split,
        batch_rows=job.spec.batch_rows,
        order=order,
        rank=rank,
        world_size=world_size,
    )


def on_device(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """The batch's columns on `device`. Pinned memory is copied without waiting for the device."""
    if device.type == "cpu":
        return dict(batch.columns)
    return {name: column.to(device, non_blocking=True) for name, column in batch.columns.items()}
