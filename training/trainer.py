"""How does the driver run one attempt at training on Ray Train, hear of it while it runs, stop it, and say what came of it?"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
import ray.train
from pydantic import Field
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from penstock.config import Section
from penstock.errors import PenstockError, TrainingError
from training.checkpoint import CheckpointStore
from training.job import TrainJob
from training.mailbox import CheckpointCommitted, Event, Failure, Resumed, Warned, WorkerStarted, start_mailbox
from training.worker import RankResult, train_loop_per_worker

__all__ = ["TrainOutcome", "train"]

_log = logging.getLogger("penstock.train")

POLL_S = 0.3
STOP_GRACE_S = 20.0
"""How long the workers may take to reach the next step and save, before they are killed."""
KILL_GRACE_S = 20.0
"""How long Ray Train may take to notice that its workers are gone."""
_KNOBS = {
    # A dead worker is noticed within a poll; Ray's own 2 s would be most of the time a restart of a small model takes.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # A frozen worker (or a dead network) is given up after this instead of ten minutes.
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "120",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "180",
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "300",
    # Ray would move workers into a scratch folder, where a recipe's relative paths mean something else.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
_WORKER_ENVIRONMENT = {
    # DDP warns that find_unused_parameters costs time; training/learner.py says why it is worth it.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Read by cuBLAS when it is first used: without it its results may differ from run to run.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
COLLECTIVE_TIMEOUT_S = 900
"""A rank that is alive but stuck in user code shows as a collective that times out on the others."""


class TrainOutcome(Section):
    """What came of one attempt."""

    status: Literal["finished", "interrupted"]
    step: int
    epoch: int
    position: int
    checkpoint: str | None
    """Name of the newest checkpoint; None only when a stop came before the first."""
    best_checkpoint: str | None = None
    weights_digest: str
    """Of the weights to register: the best checkpoint's where `train.checkpoint.best` is set, else the newest one's."""
    metrics: dict[str, float]
    """Measured on the newest checkpoint's weights."""
    exactness: str
    resumed_from_step: int | None = None
    restarts: int = 0
    """Worker groups that died and were started again within the attempt."""
    warnings: list[str] = Field(default_factory=list)
    world_size: int


def train(
    job: TrainJob,
    *,
    stop: threading.Event,
    listener: Callable[[list[Event]], None],
    ray_storage: str,
    use_gpu: bool | None = None,
) -> TrainOutcome:
    """Train to the end of the spec, or until `stop` is set; continues from the newest checkpoint in `job.run_storage`.

    Runs in the driver, in any thread; Ray is connected already. Worker deaths are retried `train.retries` times. An error that
    a user can act on (a bug in the recipe, a bad row, a checkpoint that cannot be written) ends the attempt at once.

    Args:
        job: what to train.
        stop: when set, the workers save at the next step and the outcome is `interrupted`.
        listener: gets the events in order, in this thread; it should not raise, and must not block for long.
        ray_storage: folder or URI for Ray Train's own bookkeeping, which is never read back.
        use_gpu: None uses a GPU per worker when the spec allows it and the cluster has as many.

    Raises:
        TrainingError: the retries are used up; the first cause is shown.
        PenstockError: a rank failed with an error of its own; it is raised as it was.
    """
    for name, value in _KNOBS.items():
        os.environ.setdefault(name, value)
    mailbox = start_mailbox()
    attempt = _Attempt(job, listener)
    fit = _Fit(_trainer(job, mailbox, ray_storage, _gpus_per_worker(job, use_gpu)))
    fit.start()
    stopping = _Stopping(stop, mailbox)
    while fit.is_alive() and not stopping.given_up:
        fit.join(POLL_S)
        attempt.hear(ray.get(mailbox.take.remote()))
        stopping.pursue()
    attempt.hear(ray.get(mailbox.take.remote()))
    ray.kill(mailbox)
    return attempt.outcome(fit, stopped=stop.is_set())


def _trainer(job: TrainJob, mailbox: Any, ray_storage: str, gpus: float) -> TorchTrainer:
    resources = {"CPU": job.spec.cpus_per_worker} | ({"GPU": gpus} if gpus else {})
    return TorchTrainer(
        train_loop_per_worker,  # type: ignore[arg-type]  # Train V2 hands the return value on
        train_loop_config={"job": job, "mailbox": mailbox},
        torch_config=TorchConfig(timeout_s=COLLECTIVE_TIMEOUT_S),
        scaling_config=ScalingConfig(num_workers=job.spec.workers, use_gpu=gpus > 0, resources_per_worker=resources),
        run_config=RunConfig(
            # A name of its own for every attempt: Ray must never find an index it wrote earlier, for ours is the truth.
            name=f"{job.pipeline}-{job.attempt}-{uuid.uuid4().hex[:8]}",
            storage_path=ray_storage if "://" in ray_storage else os.path.abspath(ray_storage),
            failure_config=FailureConfig(  # type: ignore[call-arg]  # V2's fields; the annotations are V1's
                max_failures=job.spec.retries, controller_failure_limit=3, max_preemption_failures=100
            ),
            worker_runtime_env={"env_vars": _WORKER_ENVIRONMENT},
            callbacks=[_NoRetryOfUserErrors()],  # type: ignore[list-item]
        ),
    )


class _NoRetryOfUserErrors(ray.train.UserCallback):
    """Ends the run when a worker failed with an error that a restart would only repeat. Runs in Ray Train's controller.

    Ray Train retries every exception alike; what a callback raises, it does not retry.
    """

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Raise the first such error."""
        for _, error in sorted(worker_exceptions.items()):
            if isinstance(error, PenstockError):
                raise error


class _Fit(threading.Thread):
    """`TorchTrainer.fit()` in a thread, because it blocks until the end."""

    def __init__(self, trainer: TorchTrainer) -> None:
        super().__init__(name="penstock-fit", daemon=True)
        self._trainer = trainer
        self.result: RankResult | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        """Run to the end and keep what came of it."""
        try:
            self.result = self._trainer.fit().return_value  # type: ignore[attr-defined]
        except Exception as error:
            self.error = error


class _Stopping:
    """Passes a stop on to the workers, and loses patience in steps: ask, kill the workers, give up waiting for Ray."""

    def __init__(self, stop: threading.Event, mailbox: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._stop, self._mailbox, self._clock = stop, mailbox, clock
        self._asked_s: float | None = None
        self._killed = False
        self.given_up = False

    def pursue(self) -> None:
        """Do what is due now."""
        if not self._stop.is_set():
            return
        if self._asked_s is None:
            self._asked_s = self._clock()
            ray.get(self._mailbox.stop.remote())
        waited_s = self._clock() - self._asked_s
        if waited_s > STOP_GRACE_S and not self._killed:
            self._killed = True
            _log.warning("the workers did not stop within %.0f s and are killed; the last checkpoint stands", STOP_GRACE_S)
            for worker in ray.get(self._mailbox.workers.remote()):
                ray.kill(worker)
        self.given_up = waited_s > STOP_GRACE_S + KILL_GRACE_S


@dataclass
class _Attempt:
    """What the driver has heard so far."""

    job: TrainJob
    listener: Callable[[list[Event]], None]
    warnings: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    committed: CheckpointCommitted | None = None
    resumed: Resumed | None = None
    """The first resume of the attempt; later ones are restarts."""
    restarts: int = 0
    _listener_failed: bool = False

    def hear(self, events: list[Event]) -> None:
        """Take in events and pass them on."""
        for event in events:
            if isinstance(event, Warned):
                self.warnings.append(event.message)
            elif isinstance(event, Resumed):
                self.warnings.extend(event.warnings)
                self.resumed = self.resumed or event
            elif isinstance(event, CheckpointCommitted):
                self.committed = event
            elif isinstance(event, Failure):
                self.failures.append(event)
            elif isinstance(event, WorkerStarted) and event.rank == 0:
                self.restarts = event.restart
        if not events:
            return
        try:
            self.listener(events)
        except Exception as error:  # whoever only listens must not stop training
            if not self._listener_failed:
                _log.warning("the listener of training events fails: %s", error, exc_info=True)
                self.warnings.append(f"training events could not be passed on: {type(error).__name__}: {error}")
            self._listener_failed = True

    def outcome(self, fit: _Fit, *, stopped: bool) -> TrainOutcome:
        """Say what came of it, from the checkpoints on storage and from what was heard."""
        if fit.result is None and not stopped:
            raise self._error(fit.error)
        store = CheckpointStore(self.job.run_storage, self.job.spec.checkpoint.keep, self.job.spec.checkpoint.best)
        committed = store.committed()
        newest = committed[0] if committed else None
        best = store.best()
        chosen = best or newest
        finished = fit.result is not None and fit.result.status == "finished"
        metrics = newest.manifest.metrics if newest else {}
        return TrainOutcome(
            status="finished" if finished else "interrupted",
            step=newest.manifest.step if newest else 0,
            epoch=newest.manifest.epoch if newest else 0,
            position=newest.manifest.position if newest else 0,
            checkpoint=newest.name if newest else None,
            best_checkpoint=best.name if best else None,
            weights_digest=chosen.manifest.weights_digest if chosen else "",
            metrics={name: value for name, value in metrics.items() if value is not None},
            exactness=newest.manifest.exactness if newest else "bit-exact",
            resumed_from_step=self.resumed.step if self.resumed else None,
            restarts=self.restarts,
            warnings=self.warnings,
            world_size=self.job.spec.workers,
        )

    def _error(self, error: Exception | None) -> PenstockError:
        """The first cause: a rank's own finding before the broken connections it left the others with."""
        ranked = sorted(self.failures, key=lambda failure: (not failure.final, failure.t_ms))
        own = next((failure.error for failure in ranked if isinstance(failure.error, PenstockError)), None)
        if own is not None:
            return own
        shown = ranked[0] if ranked else None
        cause = f"rank {shown.rank}: {shown.text.strip().splitlines()[-1]}" if shown else f"{type(error).__name__}: {error}"
        others = len({failure.rank for failure in ranked}) - 1
        more = f" ({others} more ranks failed after it)" if others > 0 else ""
        return TrainingError(
            f"training failed after {self.restarts} restarts: {cause}{more}",
            problems=shown.text.strip().splitlines()[-8:-1] if shown else (),
            next_step="run the same command again; it continues from the newest checkpoint",
        )


def _gpus_per_worker(job: TrainJob, use_gpu: bool | None) -> float:
    wanted = job.spec.gpus
    if use_gpu is False or wanted == 0:
        return 0.0
    per_worker = 1 if wanted == "auto" else wanted
    there = ray.cluster_resources().get("GPU", 0.0)
    if wanted == "auto" and use_gpu is None and there < job.spec.workers:
        return 0.0
    return float(per_worker)
