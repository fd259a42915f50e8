"""How fast do rows arrive? Each rank reads the train split as training would, with no model, and notes what it waits for."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Generator
from contextlib import closing
from functools import partial

import numpy as np
import torch
from pydantic import Field

from penstock.config import Section
from penstock.ingest.feed.batch import Batch, Feed
from penstock.ingest.phases import Phase, PhaseClock, counting
from penstock.storage import Storage
from penstock.training.determinism import in_deterministic_mode, make_deterministic
from penstock.training.job import TrainJob
from penstock.training.loop.event_sender import MailboxClient
from penstock.training.on_ray.worker import RankResult
from penstock.training.open_feeds import open_job_feed
from penstock.training.ranks import Group
from penstock.training.recipe import load_recipe
from penstock.training.state import TrainState

__all__ = ["RankReading", "read_rank", "readings_of"]


EPOCHS, LEAST_S = 2, 1.0
"""So many epochs are read if there is time, since what a cache has kept shows in the second one, and small data for so long."""

KEPT_WAITS = 2000
"""Waits that are handed on, evenly chosen: enough for a plot."""

_READINGS = "readings.json"


class RankReading(Section):
    """What one rank saw."""

    rank: int
    host: str
    first_batch_s: float
    """From the opening of the feed until the first batch was there. What follows counts from then on."""
    first_phases: dict[Phase, float] = Field(default_factory=dict)
    """Seconds of `first_batch_s` by place (`penstock.ingest.phases`)."""
    rows: int
    bytes: int
    """Of the batches' tensors."""
    seconds: float
    p50_s: float
    """Of the waits for a batch."""
    p95_s: float
    longest_s: float
    epochs: float
    """How far it came: 1.5 is in the middle of the second epoch."""
    phases: dict[Phase, float] = Field(default_factory=dict)
    """Seconds of `phases_s` by place."""
    phases_s: float
    """From the first batch to the end of the second epoch, or of reading."""
    fetched_bytes: int = 0
    """Bytes of shards that came into the node's cache, those of the first batch included."""
    waits_s: list[float] = Field(default_factory=list)
    """Waits for a batch in their order, some of them left out."""


def read_rank(
    job: TrainJob, group: Group, client: MailboxClient, *, stop: bool = False, restart: int = 0, limit_s: float = 10.0
) -> RankResult:
    """Read as one rank of `group`, `limit_s` seconds beyond the first batch, and leave all readings in the job's run storage.

    Takes the place of `penstock.training.on_ray.worker.run_rank`; a collective.

    Args:
        stop: a stop was requested before this worker started.
    """
    make_deterministic(job.spec.cpus_per_worker)
    reading = _read(job, group, 0.0 if group.from_first(stop) else limit_s)
    everyones = group.everyones({"reading": reading.model_dump_json()})
    if group.is_first:
        job.run_storage.write_json(_READINGS, [json.loads(each["reading"]) for each in everyones])
    return RankResult("finished", TrainState(), "bit-exact", None, None)


def readings_of(run_storage: Storage) -> list[RankReading]:
    """What the ranks left, in rank order."""
    return [RankReading.model_validate(each) for each in run_storage.read_json(_READINGS)]


def _read(job: TrainJob, group: Group, limit_s: float) -> RankReading:
    waits: list[float] = []
    rows = size = 0
    epochs = 0.0
    with counting() as clock:
        began_s = time.perf_counter()
        feed = open_job_feed(job, "train", group.rank, group.world_size, group.device)
        _augment(job, feed)
        batches = _epochs(feed)
        next(batches, None)
        _wait_for_copies(clock, group.device)
        asked_s = first_s = time.perf_counter()
        first_phases = clock.restart()
        phases, phases_s, fetched_bytes = clock.result(), 0.0, clock.fetched_bytes
        for epoch, batch in batches:
            _wait_for_copies(clock, group.device)
            now_s = time.perf_counter()
            waits.append(now_s - asked_s)
            rows, size = rows + batch.rows, size + sum(column.nbytes for column in batch.columns.values())
            epochs = epoch + batch.position / feed.num_rows
            read_s = now_s - first_s
            if epoch < EPOCHS:
                phases, phases_s, fetched_bytes = clock.result(), read_s, clock.fetched_bytes
            if read_s > limit_s or (epochs >= EPOCHS and read_s > LEAST_S):
                break
            asked_s = time.perf_counter()
        seconds = time.perf_counter() - first_s
    batches.close()
    seen = np.array(waits or [0.0])
    return RankReading(
        rank=group.rank,
        host=socket.gethostname(),
        rows=rows,
        bytes=size,
        seconds=seconds,
        first_batch_s=first_s - began_s,
        first_phases=first_phases,
        p50_s=float(np.quantile(seen, 0.5)),
        p95_s=float(np.quantile(seen, 0.95)),
        longest_s=float(seen.max()),
        epochs=epochs,
        phases=phases,
        phases_s=phases_s,
        fetched_bytes=fetched_bytes,
        waits_s=[round(wait_s, 7) for wait_s in waits[:: max(1, -(-len(waits) // KEPT_WAITS))]],
    )


def _epochs(feed: Feed) -> Generator[tuple[int, Batch]]:
    """Batches of one epoch after the other, without end, each with its epoch."""
    for epoch in itertools.count():
        with closing(feed.batches(epoch)) as batches:  # type: ignore[type-var]  # a generator, in every feed
            for batch in batches:
                yield epoch, batch


def _augment(job: TrainJob, feed: Feed) -> None:
    """Let the feed change batches as it will in training. Of the frameworks torch alone has recipes that do."""
    if job.spec.framework != "torch":
        return
    recipe = load_recipe(job.code, job.spec.params)
    if recipe.can_augment:
        feed.augment_with(in_deterministic_mode(partial(recipe.augment, packed=feed.schema.packed)), job.seed)


def _wait_for_copies(clock: PhaseClock, device: torch.device) -> None:
    """Training would learn meanwhile; here the copy to the GPU shows as what it takes."""
    if device.type == "cuda":
        clock.enter("copy")
        torch.cuda.synchronize(device)
        clock.leave()
