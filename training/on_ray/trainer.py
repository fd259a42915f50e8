"""How does the driver run one attempt at training on Ray Train: start it, listen, stop it, and lose patience?"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import ray
import ray.train
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from penstock.errors import TrainingError
from penstock.redact import first_line
from penstock.training.events import Event, StopAsked
from penstock.training.job import TrainJob, TrainOutcome
from penstock.training.on_ray.controller_callbacks import FixedWorkers, NoRetryOfUserErrors, TellsTheDriver
from penstock.training.on_ray.event_log import EventLog
from penstock.training.on_ray.joined_late import leave_mark
from penstock.training.on_ray.mailbox import start_mailbox
from penstock.training.on_ray.one_task import TaskFit, is_one_task
from penstock.training.on_ray.one_worker import needs_of_one_worker
from penstock.training.on_ray.silence import Silence
from penstock.training.on_ray.worker import RankResult, train_loop_per_worker

__all__ = ["TrainOutcome", "train"]


_log = logging.getLogger("penstock.train")

POLL_S = 0.3

STOP_GRACE_S = 20.0
"""How long the workers may take to reach the next step (or to end a validation) before they are killed."""

SAVE_GRACE_S = 600.0
"""How long they may take to write the checkpoint from there on."""

KILL_GRACE_S = 20.0
"""How long Ray Train may take to notice that its workers are gone."""

COLLECTIVE_TIMEOUT_S = 900
"""A rank that is alive but stuck in user code shows as a collective that times out on the others."""

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
    # Ray would take `print` for its own log files; printed.py shows what user code prints.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # Ray would move workers into a scratch folder, where a recipe's relative paths mean something else.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


def train(
    job: TrainJob,
    *,
    stop: threading.Event,
    listener: Callable[[list[Event]], None],
    own_cluster: bool = False,
    work: Callable[..., RankResult] | None = None,
    in_ray_train: bool = False,
) -> TrainOutcome:
    """Train to the end of the spec, or until `stop` is set; continues from the newest checkpoint in `job.run_storage`.

    Runs in the driver, in any thread; Ray is connected already. Worker deaths, and exceptions that are not a user's to
    correct, are retried `train.retries` times. An error that a user can act on (a bug in the recipe, a bad row, a checkpoint
    that cannot be written) ends the attempt at once.

    Args:
        job: what to train.
        stop: when set, the workers save at the next step and the outcome is `interrupted`.
        listener: gets the events in order, in this thread; it should not raise, and must not block for long.
        own_cluster: nothing else uses the cluster and it will not grow, so that its autoscaler need not be asked.
        work: what each worker does, a module's function; None is `penstock.training.on_ray.worker.run_rank`.
        in_ray_train: `work` calls functions of `ray.train`, so that a lone worker too has to be one of Ray Train's.

    Raises:
        TrainingError: the retries are used up, and the first cause is shown; or the driver lost Ray.
        PenstockError: a rank failed with an error of its own; it is raised as it was.
    """
    for name, value in _KNOBS.items():
        os.environ.setdefault(name, value)
    leave_mark(job.run_storage, job.attempt)
    try:
        return _follow(job, stop, listener, own_cluster=own_cluster, work=work, in_ray_train=in_ray_train)
    except ray.exceptions.RayError as error:  # of a call to the mailbox, which is on this machine
        # It is no error that the stage is tried again for: workers that live on must end with this process first.
        raise TrainingError(
            f"the driver lost Ray while it trained: {type(error).__name__}: {first_line(error)}",
            next_step="look at the memory of this machine; the same command continues from the newest checkpoint",
        ) from error


def _follow(
    job: TrainJob,
    stop: threading.Event,
    listener: Callable[[list[Event]], None],
    *,
    own_cluster: bool,
    work: Callable[..., RankResult] | None,
    in_ray_train: bool,
) -> TrainOutcome:
    mailbox = start_mailbox()
    attempt = EventLog(job, listener)
    need, chosen = needs_of_one_worker(job.spec)
    attempt.hear(chosen)
    fit: _Fit | TaskFit
    if is_one_task(job, need) and not in_ray_train:
        fit = TaskFit(job, mailbox, need, work)
    else:
        trainer = _trainer(job, mailbox, need, work)
        trainer.own_cluster = own_cluster
        fit = _Fit(trainer)
    silence = Silence(job.spec, need)
    stopping = _Stopping(stop, mailbox)
    try:
        fit.start()
        while not fit.over.wait(POLL_S) and not stopping.given_up:
            attempt.hear(silence.hear(ray.get(mailbox.take.remote())))
            if stopping.pursue(attempt.saves):
                attempt.hear([StopAsked()])
            attempt.hear(silence.tell())
        attempt.hear(silence.hear(ray.get(mailbox.take.remote())))
    finally:
        fit.end(mailbox)
        ray.kill(mailbox)
    if fit.result is None and (not stop.is_set() or attempt.final_failure is not None):
        raise attempt.error(fit.error) from fit.error
    return attempt.outcome(fit.result)


class _LeanTrainer(TorchTrainer):
    """Starts no process that does nothing for us: each takes a core for 1.5 s while everybody waits for the first step.

    Attributes:
        own_cluster: as in `train`.
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
    "PlacementGroupCleanerCallback",  # frees what a controller that died has reserved; the end of the driver frees it too
}


def _trainer(
    job: TrainJob, mailbox: Any, need: dict[str, float], work: Callable[..., RankResult] | None = None
) -> _LeanTrainer:
    return _LeanTrainer(
        train_loop_per_worker,  # type: ignore[arg-type]  # Train V2 hands the return value on
        train_loop_config={"job": job, "mailbox": mailbox, "work": work},
        torch_config=TorchConfig(timeout_s=COLLECTIVE_TIMEOUT_S),
        scaling_config=ScalingConfig(num_workers=job.spec.workers, use_gpu="GPU" in need, resources_per_worker=need),
        run_config=RunConfig(
            # A name of its own for every attempt: Ray must never find an index it wrote earlier, for ours is the truth.
            name=f"{job.pipeline}-{job.attempt}-{uuid.uuid4().hex[:8]}",
            # What Ray Train would keep for itself we never read. In memory it needs no folder that all nodes share.
            storage_path="penstock",
            storage_filesystem=PyFileSystem(FSSpecHandler(MemoryFileSystem())),
            failure_config=FailureConfig(  # type: ignore[call-arg]  # V2's fields; the annotations are V1's
                max_failures=job.spec.retries, controller_failure_limit=3, max_preemption_failures=100
            ),
            # Ray prints each rank's traceback several times; `EventLog` tells the first cause, and Ray's log files hold all.
            logging_config=LoggingConfig(log_level="CRITICAL"),
            callbacks=[NoRetryOfUserErrors(), TellsTheDriver(mailbox)],  # type: ignore[list-item]
        ),
    )


class _Fit(threading.Thread):
    """`TorchTrainer.fit()` in a thread, because it blocks until the end.

    Attributes:
        over: set unless it runs. After a signal's exception in `join`, `is_alive` says False of a thread that lives.
    """

    def __init__(self, trainer: _LeanTrainer) -> None:
        super().__init__(name="penstock-fit", daemon=True)
        self._trainer = trainer
        self.result: RankResult | None = None
        self.error: Exception | None = None
        self.over = threading.Event()
        self.over.set()

    def start(self) -> None:
        """Begin."""
        self.over.clear()
        super().start()

    def run(self) -> None:
        """Run to the end and keep what came of it."""
        try:
            self.result = self._trainer.fit().return_value  # type: ignore[attr-defined]
        except Exception as error:  # carried to the thread that waits, which judges it
            self.error = error
        finally:
            self.over.set()

    def end(self, mailbox: Any) -> None:
        """Kill Ray Train's controller, and its workers with it, unless all is over.

        A thread that is in Ray's hands while the driver disconnects ends the process with exit code 1, at once. What the
        controller has reserved on the cluster is free again when the driver disconnects.
        """
        give_up_s = time.monotonic() + KILL_GRACE_S
        with contextlib.suppress(ray.exceptions.RayError):
            while not self.over.is_set() and time.monotonic() < give_up_s:
                controller = ray.get(mailbox.controller.remote(), timeout=KILL_GRACE_S)
                if controller is not None:  # it may still be starting
                    ray.kill(controller)
                self.over.wait(POLL_S)
        # Ray is gone, and `fit` with it; or the mailbox is, and workers that do not reach it save and end.
        self.over.wait(give_up_s - time.monotonic())


class _Stopping:
    """Passes a stop on to the workers, and loses patience in steps: ask, kill the workers, give up waiting for Ray."""

    def __init__(self, stop: threading.Event, mailbox: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._stop, self._mailbox, self._clock = stop, mailbox, clock
        self._asked_s: float | None = None
        self._saves_before = 0
        self._killed_s: float | None = None
        self.given_up = False

    def pursue(self, saves: int) -> bool:
        """Do what is due now; `saves` counts the checkpoints begun so far. True when the workers have just been asked."""
        if not self._stop.is_set():
            return False
        now_s = self._clock()
        asked = self._asked_s is None
        if self._asked_s is None:
            self._asked_s, self._saves_before = now_s, saves
            ray.get(self._mailbox.stop.remote())
        grace_s = SAVE_GRACE_S if saves > self._saves_before else STOP_GRACE_S
        if self._killed_s is not None:
            self.given_up = now_s - self._killed_s > KILL_GRACE_S
        elif now_s - self._asked_s > grace_s:
            self._killed_s = now_s
            _log.warning("the workers did not stop within %.0f s and are killed; the last checkpoint stands", grace_s)
            for worker in ray.get(self._mailbox.workers.remote()):
                ray.kill(worker)
        return asked
