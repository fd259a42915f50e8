"""A small real dataset (sklearn's digits) in the cached form, and jobs that train on it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

from penstock.digest import digest_of, file_digest
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.feed.batch import Batch
from penstock.ingest.feed.cursor import Feed
from penstock.ingest.manifest import DatasetManifest, ShardInfo, ShardTable
from penstock.ingest.materialize.shard_file import write_shard
from penstock.ingest.schema import SPLITS, ColumnInfo, FeedSchema, Split
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import SampleSpec, ShuffleSpec
from penstock.storage import Storage
from penstock.training.events import Event
from penstock.training.job import CallbackCode, TrainJob
from penstock.training.on_ray.worker import RankResult, run_rank
from penstock.training.open_feeds import _open_cached
from penstock.training.ranks import Group
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import capture

CPU = torch.device("cpu")
ROWS = {"train": 333, "validation": 101, "test": 120}
SCHEMA = FeedSchema(
    columns=(ColumnInfo(name="image", dtype="float32", shape=(8, 8)), ColumnInfo(name="label", dtype="int64")),
    label="label",
    num_classes=10,
    classes=tuple(str(digit) for digit in range(10)),
)


def write_digits(storage: Storage) -> DatasetManifest:
    """Write the digits as a cached dataset of a few shards."""
    import pyarrow as pa

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16.0).astype(np.float32)
    shards: list[ShardInfo] = []
    first = 0
    for split in SPLITS:
        for part in np.array_split(np.arange(first, first + ROWS[split]), 2):
            path = f"units/digits/{split}-{len(shards):05d}.arrow"
            local = storage.local_path(path)
            local.parent.mkdir(parents=True, exist_ok=True)
            table = pa.table({"image": tensor_array(images[part]), "label": tensor_array(labels[part].astype(np.int64))})
            write_shard(local, [table])
            info = ShardInfo(
                path=path,
                split=split,
                rows=len(part),
                size_bytes=local.stat().st_size,
                digest=file_digest(local),
                unit="digits",
            )
            shards.append(info)
        first += ROWS[split]
    manifest = DatasetManifest(
        key="digits",
        feed_schema=SCHEMA,
        rows=dict(ROWS),
        table=ShardTable.of(shards),
        content_digest=digest_of([shard.digest for shard in shards]),
        split_digests={split: digest_of([shard.digest for shard in shards if shard.split == split]) for split in SPLITS},
    )
    manifest.table.write(storage, manifest.key)  # other processes read it
    return manifest


def make_job(
    folder: Path, *, run: str = "run", recipe: str = "Digits", attempt: int = 1, sample: SampleSpec | None = None, **spec: Any
) -> TrainJob:
    """A job below `folder`; the dataset is written on first use. `spec` are fields of the train section."""
    data = Storage(str(folder / "data"))
    manifest = write_digits(data)
    manifest.table.write(data, manifest.key)  # which ranks in processes of their own read
    settings: dict[str, Any] = {"epochs": 2, "batch_rows": 48, "checkpoint": {"every_s": None}, **spec}
    train = TrainSpec(recipe=f"recipes.py:{recipe}", **settings)
    here = Path(__file__).parent
    callbacks = [CallbackCode(n, o, capture(n, here, o) if ":" in n else None) for n, o in train.named_callbacks]
    order = make_order(ShuffleSpec(seed=17, sample=sample), ROWS["train"])
    return TrainJob(
        run_storage=Storage(str(folder / run)),
        data_storage=data,
        manifest=manifest,
        order=order,
        spec=train,
        seed=17,
        code=capture(f"recipes.py:{recipe}", here),
        callbacks=tuple(callbacks),
        attempt=attempt,
        pipeline="digits",
        identity={"data": manifest.content_digest, "order": order.fingerprint, "batch_rows": str(settings["batch_rows"])},
        open_feeds=RecordingFeeds(),
    )


class RecordingFeeds:
    """Opens feeds as a worker does, and writes the rows of each batch of the train split to the run's folder."""

    def __call__(self, job: TrainJob, split: Split, rank: int, world_size: int) -> Feed:
        feed: Any = _open_cached(job, split, rank, world_size)
        path, batches = job.run_storage.local_path(f"rows/{job.attempt}-{rank}.jsonl"), feed.batches
        steps_per_epoch = -(-job.order.epoch_rows // job.spec.batch_rows)

        def recorded(epoch: int, position: int = 0) -> Iterator[Batch]:
            path.parent.mkdir(parents=True, exist_ok=True)
            for batch in batches(epoch, position):
                step = epoch * steps_per_epoch + (batch.position - 1) // job.spec.batch_rows
                record = {"step": step, "epoch": epoch, "first_row": batch.first_row, "rows": batch.row_ids.tolist()}
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
                yield batch

        if split == "train":
            feed.batches = recorded
        return feed  # type: ignore[no-any-return]


class ListClient:
    """A mailbox in memory that asks for a stop once enough steps were reported."""

    def __init__(self, stop_after_step: int | None = None) -> None:
        self.events: list[Event] = []
        self.stop = threading.Event()
        self._stop_after_step = stop_after_step

    def put(self, events: list[Event]) -> bool:
        """Keep the events."""
        self.events.extend(events)
        steps = [event.step for event in events if hasattr(event, "step")]
        if self._stop_after_step is not None and steps and max(steps) >= self._stop_after_step:
            self.stop.set()
        return self.stop.is_set()


def train_alone(job: TrainJob, client: ListClient | None = None) -> RankResult:
    """Train in this process, without Ray, as a group of one."""
    return run_rank(job, Group(0, 1, CPU), client or ListClient())
