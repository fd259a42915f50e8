"""How is a training of one worker started without a new process? As a Ray task: Ray gives it one that has trained before.

Ray Train starts a controller and a worker for each training, and what they import takes seconds: longer than a short trial of
a sweep trains. `run_rank` is the same in both, and so are its weights.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError, WorkerCrashedError

from penstock.training.job import TrainJob
from penstock.training.on_ray.worker import RankResult, train_alone

__all__ = ["TaskFit", "may_use_a_process_again"]

_END_S = 20.0
"""How long a cancelled task may take to be gone."""


def may_use_a_process_again(job: TrainJob, need: dict[str, float]) -> bool:
    """Whether `job` is one of several in a row, and small: Ray ends a process that was given a GPU, to free its memory."""
    return job.one_of_many and job.spec.workers == 1 and "GPU" not in need


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

    def __init__(self, job: TrainJob, mailbox: Any, need: dict[str, float]) -> None:
        super().__init__(name="penstock-fit", daemon=True)
        self._task = ray.remote(train_alone).options(
            num_cpus=need["CPU"], max_retries=job.spec.retries, scheduling_strategy="SPREAD"
        )
        self._arguments = (job, mailbox)
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
        except (WorkerCrashedError, OutOfMemoryError) as error:
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
