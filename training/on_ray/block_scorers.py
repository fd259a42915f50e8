"""Who else on the cluster answers to blocks of a split that is being measured? Free workers, where it would take long alone.

Runs in the process that measures. It begins alone. What is not answered by the time it is due it answers to itself, so a
worker that finds no place, or dies, costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import ray
import torch

from penstock.ingest.schema import Split
from penstock.machine.prints import keeping_prints, print_again
from penstock.redact import hiding_secrets
from penstock.storage import Storage
from penstock.training.evaluation.blocks import Answer, BlockScorer, num_blocks, threads_of
from penstock.training.job import TrainJob
from penstock.training.model import ModelSpec
from penstock.training.on_ray.resources import room_for
from penstock.training.on_ray.silence import Cluster
from penstock.training.open_feeds import StreamFeeds

__all__ = ["BlockScorers", "can_share_out"]

WORTH_S = 20.0
"""What is left must take so long alone, or workers would hardly have begun when it is done: they take 5 to 10 s to start."""

QUEUED_BLOCKS = 2
"""Blocks that a worker has to do at a time; their answers wait in Ray's object store."""


def can_share_out(job: TrainJob) -> bool:
    """Whether a process can begin to read a split anywhere, to batches that are known beforehand."""
    return job.order.by_length is None and not isinstance(job.open_feeds, StreamFeeds)


class _Worker:
    """A `BlockScorer` whose prints come with its answers, without secrets."""

    def __init__(self, job: TrainJob, model: ModelSpec, files: Storage) -> None:
        with hiding_secrets():
            torch.set_num_threads(threads_of(job))
            self._scorer = BlockScorer(job, model, files)

    def ready(self) -> None:
        """Returns once the model is loaded."""

    def answers(self, split: Split, block: int) -> tuple[list[Answer], list[str]]:
        with keeping_prints() as printed, hiding_secrets():
            found = self._scorer.answers(split, block)
        return found, printed.take()


class BlockScorers:
    """Workers on the cluster that answer to blocks, from the moment on where that is worth it. See `BlocksOf`.

    Args:
        need: CPUs and GPUs of one of them; by default as many as this process has.
        worth_s: see `WORTH_S`.
    """

    def __init__(
        self,
        job: TrainJob,
        model: ModelSpec,
        files: Storage,
        splits: Sequence[Split],
        need: Mapping[str, float] | None = None,
        worth_s: float = WORTH_S,
    ) -> None:
        own = ray.get_runtime_context().get_assigned_resources() if need is None else need
        self._need = {name: own[name] for name in ("CPU", "GPU") if own.get(name)}
        self._given, self._worth_s = (job, model, files), worth_s
        self._blocks = [(split, block) for split in splits for block in range(num_blocks(job, split))]
        self._starting: dict[Any, Any] = {}
        """Ready -> the worker, of those that have not said so yet."""
        self._busy: dict[Any, list[Any]] = {}
        """Worker -> answers that it owes, or has given."""
        self._asked: dict[tuple[Split, int], tuple[Any, Any]] = {}
        """Block -> the worker and its answers."""
        self._done = self._next = 0
        self._begun: float | None = None
        self._alone = True
        self.helped = 0
        """Blocks that were answered elsewhere."""

    def __call__(self, split: Split, block: int) -> list[Answer] | None:
        """What a worker has answered to a block; blocks are asked for in order."""
        at = self._blocks.index((split, block), self._done)
        self._begun = time.monotonic() if self._begun is None else self._begun
        if self._alone and at and self._left_s(at) > self._worth_s:
            self._start(at)
        self._done, self._next = at, max(self._next, at + 1)
        asked = self._asked.pop((split, block), None)
        self._hand_out()
        if asked is None:
            return None
        worker, answers = asked
        try:
            found, printed = ray.get(answers)
        except Exception:  # its process died, or user code failed: then it fails here, too, and says so
            self._forget(worker)
            return None
        print_again(printed)
        self._busy[worker].remove(answers)
        self._hand_out()
        self.helped += 1
        return cast("list[Answer]", found)

    def close(self) -> None:
        """End the workers."""
        for worker in [*self._starting.values(), *self._busy]:
            ray.kill(worker)
        self._starting, self._busy, self._asked = {}, {}, {}

    def _left_s(self, at: int) -> float:
        assert self._begun is not None
        return (time.monotonic() - self._begun) / at * (len(self._blocks) - at)

    def _start(self, at: int) -> None:
        self._alone = False
        remote: Any = ray.remote(_Worker)
        for _ in range(min(room_for(self._need, [Cluster().free()]), len(self._blocks) - at - 1)):
            options = {"num_cpus": self._need.get("CPU", 0.0), "num_gpus": self._need.get("GPU", 0.0)}
            worker = remote.options(**options).remote(*self._given)
            self._starting[worker.ready.remote()] = worker

    def _hand_out(self) -> None:
        ready, _ = ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0) if self._starting else ([], [])
        for each in ready:
            worker = self._starting.pop(each)
            with contextlib.suppress(Exception):  # one that could not load the model is not asked
                ray.get(each)
                self._busy[worker] = []
        for _ in range(QUEUED_BLOCKS):
            for worker, owed in self._busy.items():
                if len(owed) < QUEUED_BLOCKS and self._next < len(self._blocks):
                    answers = worker.answers.remote(*self._blocks[self._next])
                    owed.append(answers)
                    self._asked[self._blocks[self._next]] = (worker, answers)
                    self._next += 1

    def _forget(self, worker: Any) -> None:
        self._busy.pop(worker, None)
        self._asked = {block: asked for block, asked in self._asked.items() if asked[0] != worker}
