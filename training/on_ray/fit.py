"""How does a thread of the driver run one attempt on Ray and end it? `TaskFit` runs a task; train_group.py uses Ray Train."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayError, WorkerCrashedError

from penstock.training.job import TrainJob
from penstock.training.on_ray.mailbox import MailboxHandle
from penstock.training.on_ray.worker import AgainError, RankResult, train_alone

__all__ = ["KILL_GRACE_S", "Fit", "TaskFit", "Work"]

KILL_GRACE_S = 20.0
"""How long Ray may take to notice that the workers are gone."""

Work = Callable[..., RankResult]
"""What each worker does, with the arguments of `penstock.training.on_ray.worker.run_rank`; pickles."""


class Fit(threading.Thread, ABC):
    """One attempt, run by Ray.

    Args:
        mailbox: connects driver and workers.

    Attributes:
        over: set unless it runs. After a signal's exception in `join`, `is_alive` is False of a thread that lives.
        result: of rank 0; None after an error.
        error: of the workers or of Ray; the driver judges it.
    """

    def __init__(self, mailbox: MailboxHandle) -> None:
        super().__init__(name="penstock-fit", daemon=True)
        self._mailbox = mailbox
        self.result: RankResult | None = None
        self.error: Exception | None = None
        self.over = threading.Event()
        self.over.set()

    def start(self) -> None:
        """Start the thread."""
        self.over.clear()
        super().start()

    def run(self) -> None:
        """Train to the end and keep the result or the error."""
        try:
            self.result = self._train()
        except Exception as error:  # Ray's, or whatever a rank raised
            self.error = error
        finally:
            self.over.set()

    @abstractmethod
    def _train(self) -> RankResult:
        """Block until the end."""

    @abstractmethod
    def kill_workers(self) -> None:
        """Kill the workers that run now; those that Ray starts in their place read in the mailbox that they must stop."""

    @abstractmethod
    def end(self) -> None:
        """End everything that Ray does for this attempt, and wait for that."""


class _RankLostError(Exception):
    """The task's process died, more often than `train.retries` allows. Ray Train reports that by `worker_failures`."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.worker_failures = {0: cause}


class TaskFit(Fit):
    """A Ray task that is the only rank, in a process that Ray has at hand.

    Ray Train starts a controller, an actor through which ranks meet, and a worker; their imports take a core for ten seconds
    before the first step, longer than a short trial of a sweep trains. One rank needs none of it: its weights are the same, Ray
    starts the task again when its process dies, and the next trial runs in a process that has trained before.

    Args:
        job: the training.
        mailbox: connects driver and worker.
        need: resources of the worker.
        work: None is `run_rank`.
    """

    def __init__(self, job: TrainJob, mailbox: MailboxHandle, need: dict[str, float], work: Work | None) -> None:
        super().__init__(mailbox)
        self._task = ray.remote(train_alone).options(
            num_cpus=need["CPU"], max_retries=job.spec.retries, retry_exceptions=[AgainError], scheduling_strategy="SPREAD"
        )
        self._arguments = (job, mailbox, work)
        self._reference: Any = None

    def start(self) -> None:
        """Submit the task, so that `end` has something to end, and start the thread."""
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
        """Kill the task's process unless the task is over."""
        if not self.over.is_set():
            with contextlib.suppress(RayError):  # then Ray is gone, and the task with it
                self.kill_workers()
            self.over.wait(KILL_GRACE_S)
