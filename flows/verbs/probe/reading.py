"""How fast do rows arrive? Each rank reads the train split without a model and counts its seconds by place."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from pydantic import Field

from penstock.config import Section
from penstock.flows.verbs.probe.clock import PhaseClock, counting
from penstock.ingest.feed.batch import Batch
from penstock.ingest.feed.cursor import Feed
from penstock.ingest.phases import PHASES, Phase, fetched_so_far
from penstock.training.determinism import in_deterministic_mode, make_deterministic
from penstock.training.job import TrainJob
from penstock.training.loop.event_sender import MailboxClient
from penstock.training.on_ray.worker import RankResult
from penstock.training.open_feeds import open_job_feed
from penstock.training.ranks import Group
from penstock.training.recipe import load_recipe
from penstock.training.state import TrainState

__all__ = ["OTHER", "RankReading", "read_rank", "summarize"]

READ_S = 10.0
"""The workers read at most so long beyond their first batch."""

EPOCHS, LEAST_S = 2, 1.0
"""Small data is read for so many epochs, since the second one shows what caches keep, and at least for so long."""

OTHER = "other"
"""Seconds without a phase, such as finding rows' numbers, cutting batches apart and handing them over."""


class RankReading(Section):
    """Figures of one rank. Rows and seconds count from its first batch on."""

    rank: int
    host: str
    first_batch_s: float
    """From the opening of the feed to the first batch."""
    rows: int
    bytes: int
    """Of the batches' tensors."""
    seconds: float
    p50_s: float
    """Of the waits for a batch."""
    p95_s: float
    longest_s: float
    epochs: float
    """1.5 is in the middle of the second epoch."""
    phases: dict[Phase, float] = Field(default_factory=dict)
    """Seconds by place, the first batch included, but for its wait for Ray's processes."""
    phases_s: float
    fetched_bytes: int = 0
    """Bytes of shards that came into the node's cache."""


def read_rank(job: TrainJob, group: Group, client: MailboxClient, *, stop: bool = False, restart: int = 0) -> RankResult:
    """Read as one rank of `group` and return the readings of all. A collective.

    Takes the place of `penstock.training.on_ray.worker.run_rank`, with its arguments.
    """
    make_deterministic(job.spec.cpus_per_worker)
    reading = _read(job, group, 0.0 if group.from_first(stop) else READ_S)
    everyones = group.everyones({"reading": reading.model_dump_json()})
    returned = tuple(json.loads(each["reading"]) for each in everyones)
    return RankResult("finished", TrainState(), "bit-exact", None, None, returned)


def _read(job: TrainJob, group: Group, limit_s: float) -> RankReading:
    waits: list[float] = []
    rows = size = 0
    epochs = 0.0
    with counting() as clock:
        before = fetched_so_far()
        began_s = time.perf_counter()
        feed = open_job_feed(job, "train", group.rank, group.world_size, group.device)
        _augment(job, feed)
        batches = _epochs(feed)
        next(batches, None)
        _wait_for_copies(clock, group.device)
        first = {**clock.take(), "tasks": 0.0}
        asked_s = first_s = time.perf_counter()
        for epoch, batch in batches:
            _wait_for_copies(clock, group.device)
            waits.append(time.perf_counter() - asked_s)
            rows, size = rows + batch.rows, size + sum(column.nbytes for column in batch.columns.values())
            epochs = epoch + batch.position / feed.num_rows
            asked_s = time.perf_counter()
            read_s = asked_s - first_s
            if read_s > limit_s or (epochs >= EPOCHS and read_s > LEAST_S):
                break
        seconds, later = time.perf_counter() - first_s, clock.take()
    batches.close()
    seen = np.array(waits or [0.0])
    return RankReading(
        rank=group.rank,
        host=socket.gethostname(),
        first_batch_s=first_s - began_s,
        rows=rows,
        bytes=size,
        seconds=seconds,
        p50_s=float(np.quantile(seen, 0.5)),
        p95_s=float(np.quantile(seen, 0.95)),
        longest_s=float(seen.max()),
        epochs=epochs,
        phases={name: first[name] + later[name] for name in PHASES},
        phases_s=sum(first.values()) + seconds,
        fetched_bytes=fetched_so_far().bytes - before.bytes,
    )


def _epochs(feed: Feed) -> Generator[tuple[int, Batch]]:
    """Yield the batches of one epoch after the other, without end, each with its epoch."""
    for epoch in itertools.count():
        with closing(feed.batches(epoch)) as batches:  # type: ignore[type-var]  # a generator, in every feed
            for batch in batches:
                yield epoch, batch


def _augment(job: TrainJob, feed: Feed) -> None:
    """Let the feed change batches as in training; only recipes of torch have an `augment`."""
    if job.spec.framework != "torch":
        return
    recipe = load_recipe(job.code, job.spec.params)
    if recipe.has("augment"):
        feed.augment_with(in_deterministic_mode(partial(recipe.augment, packed=feed.schema.packed)), job.seed)


def _wait_for_copies(clock: PhaseClock, device: torch.device) -> None:
    """Count the copy to the GPU, which training would overlap with its step."""
    if device.type == "cuda":
        clock.enter("copy")
        torch.cuda.synchronize(device)
        clock.leave()


def summarize(readings: Sequence[Any], split_bytes: int) -> dict[str, Any]:
    """Combine the readings of all ranks to what `penstock probe --json` prints of them.

    Args:
        readings: as `read_rank` returns them, in rank order.
        split_bytes: of the train split's shards; 0 where it has none.
    """
    ranks = [RankReading.model_validate(each) for each in readings]
    total_s = sum(rank.phases_s for rank in ranks) or 1e-9
    shares: dict[str, float] = {}
    by_host: dict[str, int] = {}
    for rank in ranks:
        by_host[rank.host] = by_host.get(rank.host, 0) + rank.fetched_bytes
        for name, spent_s in rank.phases.items():
            shares[name] = shares.get(name, 0.0) + spent_s / total_s
    shares = {name: share for name, share in shares.items() if share > 0}
    shares[OTHER] = max(0.0, 1 - sum(shares.values()))
    place = max(shares, key=shares.__getitem__)
    return {
        "rows_per_s": sum(rank.rows for rank in ranks) / (max(rank.seconds for rank in ranks) or 1e-9),
        "worker_mib_per_s": sum(rank.bytes / 2**20 / (rank.seconds or 1e-9) for rank in ranks) / len(ranks),
        "first_batch_s": max(rank.first_batch_s for rank in ranks),
        "p50_s": median(rank.p50_s for rank in ranks),
        "p95_s": max(rank.p95_s for rank in ranks),
        "longest_s": max(rank.longest_s for rank in ranks),
        "epochs": min(rank.epochs for rank in ranks),
        "time": dict(sorted(shares.items(), key=lambda each: -each[1])),
        "place": place,
        "fetched_bytes": sum(by_host.values()),
        "fetched_by_node": by_host,
        "split_bytes": split_bytes,
        "ranks": [rank.model_dump(mode="json") for rank in ranks],
    }
