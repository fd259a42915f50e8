"""How does Ray Train start the workers of one attempt, and how is its controller ended?

A module of its own: a lone worker needs no Ray Train, and its driver does not wait for Ray Train's imports.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from typing import Any

import ray
import ray.train
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from penstock.training.job import TrainJob
from penstock.training.on_ray.controller_callbacks import FixedWorkers, NoRetryOfUserErrors, ReportsToDriver
from penstock.training.on_ray.fit import KILL_GRACE_S, Fit, Work
from penstock.training.on_ray.mailbox import MailboxHandle
from penstock.training.on_ray.worker import RankResult, train_loop_per_worker

__all__ = ["GroupFit"]

_KNOBS = {
    # A dead worker is noticed within a poll; Ray's own 2 s would be most of the time a restart of a small model takes.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # A frozen worker (or a dead network) is given up after this instead of ten minutes.
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "120",
    # Ray Train would ask anew for the same CPUs and GPUs; how long they are waited for is `train.wait_s`.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "864000",
    # Its notices are not used here (the last time-based checkpoint is recent enough), and it costs a process per worker group.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "300",
    # Ray would redirect `print` to its own log files; `sending_prints_and_fetches` shows the prints of user code.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # Ray would move workers into a scratch folder, where a recipe's relative paths mean something else.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


class GroupFit(Fit):
    """`TorchTrainer.fit()` in a thread, because it blocks until the end.

    Args:
        job: the training.
        mailbox: connects driver and workers.
        need: resources of each worker.
        work: None is `run_rank`.
        own_cluster: as in `penstock.training.on_ray.trainer.train`.
    """

    def __init__(
        self, job: TrainJob, mailbox: MailboxHandle, need: dict[str, float], work: Work | None, *, own_cluster: bool
    ) -> None:
        super().__init__(mailbox)
        for name, value in _KNOBS.items():
            os.environ.setdefault(name, value)
        self._trainer = _trainer(job, mailbox, need, work)
        self._trainer.own_cluster = own_cluster

    def _train(self) -> RankResult:
        result: RankResult = self._trainer.fit().return_value  # type: ignore[attr-defined]  # V2's; the annotations are V1's
        return result

    def kill_workers(self) -> None:
        """Kill the ranks' processes."""
        for worker in ray.get(self._mailbox.call("workers")):
            ray.kill(worker)

    def end(self) -> None:
        """Kill Ray Train's controller, and its workers with it, and wait for the thread.

        A thread that waits in Ray's core while the driver disconnects would end the process with exit code 1. What the
        controller has reserved on the cluster is free again once the driver has disconnected.
        """
        give_up_s = time.monotonic() + KILL_GRACE_S
        with contextlib.suppress(ray.exceptions.RayError):
            while not self.over.is_set() and time.monotonic() < give_up_s:
                controller = ray.get(self._mailbox.call("controller"), timeout=KILL_GRACE_S)
                if controller is not None:  # it may still be starting
                    ray.kill(controller)
                self.over.wait(0.3)
        # Ray is gone, and `fit` with it; or the mailbox is, and workers that do not reach it save and end.
        self.over.wait(give_up_s - time.monotonic())


class _LeanTrainer(TorchTrainer):
    """Starts no process that is not needed here: two that are would take 2.2 to 2.7 s of CPU each.

    From `train` to the first step of two workers all processes took 25.1 s of CPU instead of 30.8 s (2026-11-26, two cores of
    an Intel Xeon with other work, medians of five turns).

    Attributes:
        own_cluster: as in `penstock.training.on_ray.trainer.train`.
    """

    own_cluster = False

    def _create_default_callbacks(self) -> list[Any]:
        default = super()._create_default_callbacks()  # type: ignore[misc]  # V2's; the annotations are V1's
        return [each for each in default if type(each).__name__ not in _NOT_NEEDED]

    def _initialize_and_run_controller(self, *, scaling_policy: Any, **others: Any) -> ray.train.Result:
        if self.own_cluster:
            scaling_policy = FixedWorkers(scaling_policy.scaling_config)
        return super()._initialize_and_run_controller(scaling_policy=scaling_policy, **others)  # type: ignore[misc,no-any-return]


_NOT_NEEDED = {
    "DatasetsCallback",  # hands out Ray Data's datasets; our feed reads shards
    "PlacementGroupCleanerCallback",  # frees the reservations of a controller that died, as the end of the driver does, too
}


def _trainer(job: TrainJob, mailbox: MailboxHandle, need: dict[str, float], work: Work | None) -> _LeanTrainer:
    backend = job.spec.backend
    return _LeanTrainer(
        train_loop_per_worker,  # type: ignore[arg-type]  # Train V2 hands the return value on
        train_loop_config={"job": job, "mailbox": mailbox, "work": work},
        torch_config=TorchConfig(backend=backend.name, timeout_s=backend.timeout_s, init_method=backend.init_method),
        scaling_config=ScalingConfig(
            num_workers=job.spec.workers,
            use_gpu="GPU" in need,
            resources_per_worker=need,
            placement_strategy=job.spec.placement,
        ),
        run_config=RunConfig(
            # A name of its own for every attempt: Ray must not find an index that it wrote earlier.
            name=f"{job.pipeline}-{job.attempt}-{uuid.uuid4().hex[:8]}",
            # Ray Train's own records are never read. In memory they need no folder that all nodes share.
            storage_path="penstock",
            storage_filesystem=PyFileSystem(FSSpecHandler(MemoryFileSystem())),
            failure_config=FailureConfig(  # type: ignore[call-arg]  # V2's fields; the annotations are V1's
                max_failures=job.spec.retries, controller_failure_limit=3, max_preemption_failures=100
            ),
            # Ray prints each rank's traceback several times; `EventLog` reports the first cause, and Ray's log files hold all.
            logging_config=LoggingConfig(log_level="CRITICAL"),
            callbacks=[NoRetryOfUserErrors(), ReportsToDriver(mailbox, job.hosts)],  # type: ignore[list-item]
        ),
    )
