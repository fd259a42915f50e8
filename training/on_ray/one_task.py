"""How is a training of one worker run without Ray Train? As a Ray task, in a process that Ray has at hand.

Ray Train starts a controller, an actor through which ranks meet, and a worker; what they import takes a core for ten seconds
before the first step, and longer than a short trial of a sweep trains. One rank needs none of it: its work and its weights are
the same, Ray starts the task again where its process died, and the next trial runs in a process that has trained before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayError, WorkerCrashedError

from penstock.training.job import TrainJob
from penstock.training.on_ray.worker import AgainError, RankResult, train_alone

__all__ = ["TaskFit", "is_one_task"]

_END_S = 20.0
"""How long a cancelled task may take to be gone."""


def is_one_task(job: TrainJob, need: dict[str, float]) -> bool:
    """Whether `job` takes one worker, on CPUs: Ray ends a process that was given a GPU, to free its memory."""
    return job.spec.workers == 1 and "GPU" not in need


class _RankLostError(Exception):
    """The task's process died, more often than `train.retries` allows. Ray Train would say so by `worker_failures`."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.worker_failures = {0: cause}


class TaskFit(threading.Thread):
    """Stands for `TorchTrainer.fit()` in a thread: see `penstock.training.on_ray.trainer`.

    Attributes:
        over: set unless it runs.
    """

    def __init__(self, job: TrainJob, mailbox: Any, need: dict[str, float], work: Callable[..., RankResult] | None) -> None:
        super().__init__(name="penstock-fit", daemon=True)
        self._task = ray.remote(train_alone).options(
            num_cpus=need["CPU"],
            max_retries=job.spec.retries,
            retry_exceptions=[AgainError],
            scheduling_strategy="SPREAD",
        )
        self._arguments = (job, mailbox, work)
        self._reference: Any = None
        self.result: RankResult | None = None
        self.error: Exception | None = None
        self.over = threading.Event()
        self.over.set()

    def start(self) -> None:
        """Begin."""
        self.over.clear()
        self._reference = self._task.remote(*self._arguments)
        super().start()

    def run(self) -> None:
        """Wait for the end and keep what came of it."""
        try:
            self.result = ray.get(self._reference)
        except (WorkerCrashedError, NodeDiedError, OutOfMemoryError) as error:
            self.error = _RankLostError(error)
        except Exception as error:  # carried to the thread that waits, which judges it
            self.error = error
        finally:
            self.over.set()

    def end(self, mailbox: Any) -> None:
        """End the task's process, unless all is over."""
        if not self.over.is_set():
            with contextlib.suppress(RayError):  # then Ray is gone, and the task with it
                ray.cancel(self._reference, force=True)
            self.over.wait(_END_S)
