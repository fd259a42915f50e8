"""How fast do consumer processes get their rows from a contender, and do they get every row once?

Only numpy and torch are needed here: contenders with an environment of their own are measured by this code too.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.loaders.feed_data import Rows

__all__ = ["BATCH", "Batches", "Contender", "measure"]


BATCH = 256

Batches = Iterator[tuple[Tensor, Tensor]]


class Contender(NamedTuple):
    """One that is measured.

    `batches(rows, folder, rank, world, epoch)` yields (x, label) tensors: this consumer's share of one epoch in batches of 256.
    It writes its own format into `folder` on its first call, which is not timed; those that read the same format share one.
    """

    batches: Callable[[Rows, Path, int, int, int], Batches]
    folder: str


def measure(contender: Contender, rows: Rows, home: Path, world: int, seconds: float, *, check: bool) -> float:
    """Rows per second of all consumers together.

    Raises:
        RuntimeError: a consumer failed, or with `check` an epoch did not hold every row once.
    """
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(world), context.Queue()
    consumers = [
        context.Process(target=_consume, args=(contender, rows, home, rank, world, seconds, check, barrier, answers))
        for rank in range(world)
    ]
    for consumer in consumers:
        consumer.start()
    got = [answers.get(timeout=1800) for _ in consumers]
    for consumer in consumers:
        consumer.join()
    failed = [answer for answer in got if isinstance(answer, str)]
    if failed:
        raise RuntimeError(failed[0])
    if check:
        seen = np.concatenate([numbers for _, numbers in got])
        if len(seen) != rows.rows or not np.array_equal(np.sort(seen), np.arange(rows.rows)):
            raise RuntimeError(f"an epoch held {len(seen):,} rows, {len(np.unique(seen)):,} different ones, of {rows.rows:,}")
    return float(sum(rate for rate, _ in got))


def _consume(
    contender: Contender, rows: Rows, home: Path, rank: int, world: int, seconds: float, check: bool, barrier: Any, answers: Any
) -> None:
    """One consumer process: check an epoch, then count rows for `seconds`."""
    try:
        # As torchrun and Ray Train do: processes that share the cores and start a thread on each stand in each other's way.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
        folder = home / contender.folder
        if rank:
            barrier.wait(1800)  # the first one writes the format
        warm = contender.batches(rows, folder, rank, world, 0)
        first = next(warm)[1].numpy().copy()
        if not rank and world > 1:
            barrier.wait(1800)
        numbers = np.concatenate([first, *(label.numpy().copy() for _, label in warm)]) if check else None
        barrier.wait(1800)
        count, epoch, began, deadline = 0, 1, 0.0, float("inf")
        while time.perf_counter() < deadline:
            for _, label in contender.batches(rows, folder, rank, world, epoch):
                if not began:  # the start of the first epoch is not timed
                    began = time.perf_counter()
                    deadline = began + seconds
                    continue
                count += len(label)
                if time.perf_counter() >= deadline:
                    break
            epoch += 1
        answers.put((count / (time.perf_counter() - began), numbers))
    except BaseException as error:
        barrier.abort()
        answers.put(f"{type(error).__name__}: {error}")
