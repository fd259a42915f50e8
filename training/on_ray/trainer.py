"""How does the driver start one attempt on Ray, publish its events, stop it, and kill workers that do not stop?"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import ray

from penstock.errors import SpecError, TrainingError
from penstock.redact import first_line
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.events import Event, Notice
from penstock.training.job import TrainJob, TrainOutcome
from penstock.training.on_ray.event_log import EventLog
from penstock.training.on_ray.fit import KILL_GRACE_S, Fit, TaskFit, Work
from penstock.training.on_ray.mailbox import MailboxHandle, open_mailbox
from penstock.training.on_ray.one_worker import worker_needs
from penstock.training.on_ray.watcher import Watcher
from penstock.training.on_ray.worker import write_storage_probe

__all__ = ["TrainOutcome", "train"]

_log = logging.getLogger("penstock.train")

POLL_S = 0.5

STOP_GRACE_S = 20.0
"""Seconds from the stop request until workers that have not begun a checkpoint are killed."""

STOPPING = "stopping; what is trained so far is saved first, a second signal stops at once"

SAVE_GRACE_S = 600.0
"""Seconds from the stop request until workers that have begun a checkpoint are killed."""


def train(
    job: TrainJob,
    *,
    stop: threading.Event,
    listener: Callable[[list[Event]], None],
    own_cluster: bool = False,
    work: Work | None = None,
    in_ray_train: bool = False,
) -> TrainOutcome:
    """Train to the end of the spec, or until `stop` is set; continue from the newest checkpoint in `job.run_storage`.

    Runs in the driver, in any thread; Ray is connected already. The death of a worker, a
    PenstockError marked `transient` and any other exception that is not a PenstockError are retried `train.retries` times
    (training/faults.py decides for errors of user code). Any other PenstockError ends the attempt at once.

    Args:
        job: the training.
        stop: when set, the workers save as soon as they can. The outcome is `interrupted`, also if they are killed without a
            save, unless training ends first.
        listener: gets the events in order, in this thread; it should not raise, and must not block for long.
        own_cluster: nothing else uses the cluster and it will not grow, so that its autoscaler need not be asked.
        work: a module's function that each worker calls; None is `penstock.training.on_ray.worker.run_rank`.
        in_ray_train: `work` calls functions of `ray.train`, so that a lone worker, too, has to be one of Ray Train's.

    Raises:
        TrainingError: the retries are used up (the first cause is shown), or the driver lost Ray.
        PenstockError: a rank failed with an error of its own; it is raised as it was.
    """
    write_storage_probe(job.run_storage, job.attempt)
    try:
        before = job_checkpoints(job).newest_writer()  # of this attempt if a damaged shard has ended its training
        mailbox = open_mailbox(before.restart + 1 if before is not None and before.attempt == job.attempt else 0)
        need, chosen = worker_needs(job.spec)
        if job.spec.backend.name == "nccl" and "GPU" not in need:
            raise SpecError("train.backend.name is nccl, which needs a GPU for each worker, and training is on CPUs")
        watcher = Watcher(job.spec, need)
        attempt = EventLog(job, listener, watcher.handlers)
        attempt.publish(chosen)
        # Ray ends a process that was given a GPU, to free its memory: a task gains nothing there.
        if job.spec.workers == 1 and need.keys() == {"CPU"} and not in_ray_train:
            fit: Fit = TaskFit(job, mailbox, need, work)
        else:
            from penstock.training.on_ray.train_group import GroupFit  # Ray Train brings Ray Data and pandas, a second or more

            fit = GroupFit(job, mailbox, need, work, own_cluster=own_cluster)
        return _follow(fit, mailbox, attempt, watcher, stop)
    except ray.exceptions.RayError as error:  # of a call to the mailbox, which is on this machine
        # Not an error that the stage is tried again for: workers that live on must end with this process first.
        raise TrainingError(
            f"the driver lost Ray while it trained: {type(error).__name__}: {first_line(error)}",
            next_step="look at the memory of this machine; the same command continues from the newest checkpoint",
        ) from error


def _follow(fit: Fit, mailbox: MailboxHandle, attempt: EventLog, watcher: Watcher, stop: threading.Event) -> TrainOutcome:
    stopping = _Stopping(stop, mailbox, fit)
    try:
        fit.start()
        while not fit.over.wait(POLL_S) and not stopping.given_up and not attempt.refused:
            attempt.publish(ray.get(mailbox.call("take")))
            if stopping.pursue(attempt.saves):
                attempt.publish([Notice(message=STOPPING)])
            attempt.publish(watcher.due())
        attempt.publish(ray.get(mailbox.call("take")))
    finally:
        fit.end()
        mailbox.close()
    if fit.result is None and (not stop.is_set() or attempt.final_failure is not None):
        raise attempt.error(fit.error) from fit.error
    return attempt.outcome(fit.result)


class _Stopping:
    """Passes a stop on to the workers: asks them, then kills them, then stops waiting for Ray."""

    def __init__(self, stop: threading.Event, mailbox: MailboxHandle, fit: Fit) -> None:
        self._stop, self._mailbox, self._fit = stop, mailbox, fit
        self._asked_s: float | None = None
        self._saves_before = 0
        self._killed_s: float | None = None
        self.given_up = False

    def pursue(self, saves: int) -> bool:
        """Do what is due; `saves` counts the checkpoints begun so far. Returns True when the workers have just been asked."""
        if not self._stop.is_set():
            return False
        now_s = time.monotonic()
        asked = self._asked_s is None
        if self._asked_s is None:
            self._asked_s, self._saves_before = now_s, saves
            ray.get(self._mailbox.call("stop"))
        grace_s = SAVE_GRACE_S if saves > self._saves_before else STOP_GRACE_S
        if self._killed_s is not None:
            self.given_up = now_s - self._killed_s > KILL_GRACE_S
        elif now_s - self._asked_s > grace_s:
            self._killed_s = now_s
            _log.warning("the workers did not stop within %.0f s and are killed; the last checkpoint counts", grace_s)
            self._fit.kill_workers()
        return asked
