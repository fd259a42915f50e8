"""How is a training of one worker run without Ray Train? As a Ray task, in a process that Ray has at hand.

Ray Train starts a controller, an actor through which ranks meet, and a worker; what they import takes a core for ten seconds
before the first step, and longer than a short trial of a sweep trains. One rank needs none of it: its work and its weights are
the same, Ray starts the task again where its process died, and the next trial runs in a process that has trained before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayError, WorkerCrashedError

from penstock.training.job import TrainJob
from penstock.training.on_ray.fit import KILL_GRACE_S, Fit
from penstock.training.on_ray.mailbox import MailboxHandle
from penstock.training.on_ray.worker import AgainError, RankResult, train_alone

__all__ = ["TaskFit", "is_one_task"]


def is_one_task(job: TrainJob, need: dict[str, float]) -> bool:
    """Whether `job` takes one worker, on CPUs: Ray ends a process that was given a GPU, to free its memory."""
    return job.spec.workers == 1 and "GPU" not in need


class _RankLostError(Exception):
    """The task's process died, more often than `train.retries` allows. Ray Train would say so by `worker_failures`."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.worker_failures = {0: cause}


class TaskFit(Fit):
    """A Ray task that is the only rank.

    Args:
        job: what to train.
        mailbox: where it talks with the driver.
        need: resources of the worker.
        work: as in `penstock.training.on_ray.trainer.train`.
    """

    def __init__(
        self, job: TrainJob, mailbox: MailboxHandle, need: dict[str, float], work: Callable[..., RankResult] | None
    ) -> None:
        super().__init__(mailbox)
        self._task = ray.remote(train_alone).options(
            num_cpus=need["CPU"],
            max_retries=job.spec.retries,
            retry_exceptions=[AgainError],
            scheduling_strategy="SPREAD",
        )
        self._arguments = (job, mailbox, work)
        self._reference: Any = None

    def start(self) -> None:
        """Begin: from here on `end` has something to end."""
        self._reference = self._task.remote(*self._arguments)
        super().start()

    def _train(self) -> RankResult:
        try:
            result: RankResult = ray.get(self._reference)
        except (WorkerCrashedError, NodeDiedError, OutOfMemoryError) as error:
            raise _RankLostError(error) from error
        return result

    def kill_workers(self) -> None:
        """Kill the task's process."""
        ray.cancel(self._reference, force=True)

    def end(self) -> None:
        """End the task."""
        if not self.over.is_set():
            with contextlib.suppress(RayError):  # then Ray is gone, and the task with it
                self.kill_workers()
            self.over.wait(KILL_GRACE_S)
