"""How do the events of an attempt become an outcome, or the first cause of a failure?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from penstock.errors import PenstockError, ServiceError, TrainingError
from penstock.machine.stopping import stop_behind
from penstock.messages import describe_error
from penstock.training.checkpoint.outcome import outcome_of
from penstock.training.events import (
    Event,
    Failure,
    Handlers,
    Notice,
    Resumed,
    Saving,
    TrainProgress,
    Warned,
    WorkersStarting,
    WorkerStarted,
    publish,
)
from penstock.training.job import TrainJob, TrainOutcome
from penstock.training.on_ray.worker import RankResult

__all__ = ["EventLog"]

_log = logging.getLogger("penstock.train")

_LOGS = "python-core-worker-"
"""Log files that a line of Ray names; they vanish with an embedded cluster, and are on the worker's node otherwise."""


class EventLog:
    """Publishes the events of one attempt, and keeps those that the outcome or the error is made of.

    Args:
        job: the training.
        listener: gets the events; if it raises, training goes on with a warning.
        subscribers: get the events before the listener.
    """

    def __init__(self, job: TrainJob, listener: Callable[[list[Event]], None], *subscribers: Handlers) -> None:
        self._job = job
        self._listener = listener
        self._subscribers: tuple[Handlers, ...] = (
            {
                Warned: lambda event: self._warnings.append(event.message),
                Resumed: self._resume,
                Saving: self._save,
                Failure: lambda event: self._failures.setdefault(event.rank, event),
                Notice: self._note,
                TrainProgress: self._progress,
                WorkersStarting: self._starting,
                WorkerStarted: self._started,
            },
            *subscribers,
        )
        self._listener_failed = False
        self._warnings: list[str] = []
        self._failures: dict[int, Failure] = {}
        """Of the newest worker group, by rank, in the order of their arrival: the workers' clocks differ."""
        self._resumed: Resumed | None = None
        """The first resume of the attempt; later ones are restarts."""
        self._blamed = ""
        """Ranks of the newest worker group that others wait for, if no step was done since."""
        self._restarts = 0
        self._step: int | None = None
        """The last step that was reported, of the newest worker group; rank 0 reports it a few times a second."""
        self.refused = False
        """Workers are started again after an error that they would only meet again, such as in a process that died of it."""
        self.saves = 0
        """Checkpoints that were begun."""

    def publish(self, events: list[Event]) -> None:
        """Publish events, in order."""
        publish(events, *self._subscribers)
        if not events:
            return
        try:
            self._listener(events)
        except Exception as error:  # a listener must not stop training
            if stop_behind(error) is not None:
                raise
            if not self._listener_failed:
                _log.warning("the listener of training events fails: %s", error, exc_info=True)
                self._warnings.append(f"training events could not be passed on: {describe_error(error)}")
            self._listener_failed = True

    def _resume(self, event: Resumed) -> None:
        self._warnings.extend(event.warnings)
        self._resumed = self._resumed or event

    def _save(self, _event: Saving) -> None:
        self.saves += 1

    def _progress(self, event: TrainProgress) -> None:
        self._step, self._blamed = event.step, ""

    def _note(self, event: Notice) -> None:
        self._blamed = event.blamed or self._blamed

    def _starting(self, _event: WorkersStarting) -> None:
        self._step, self.refused = None, self.refused or self.final_failure is not None

    def _started(self, event: WorkerStarted) -> None:
        if event.restart > self._restarts and not self.refused:
            self._restarts, self._blamed = event.restart, ""
            self._failures.clear()

    @property
    def final_failure(self) -> PenstockError | None:
        """The error of a rank that a restart would only repeat, the earliest first."""
        errors = (failure.error for failure in self._failures.values() if failure.final)
        return next((error for error in errors if isinstance(error, PenstockError)), None)

    def outcome(self, result: RankResult | None) -> TrainOutcome:
        """Describe the attempt by the checkpoints on storage. `result` is None when the workers had to be killed."""
        return outcome_of(
            self._job,
            result.status if result is not None else "interrupted",
            exactness=result.exactness if result is not None else None,
            resumed_from_step=self._resumed.step if self._resumed else None,
            restarts=self._restarts,
            warnings=self._warnings,
            returned=result.returned if result is not None else (),
        )

    def error(self, raised: Exception | None) -> PenstockError:
        """Find the first cause: an error of penstock, else a process that died without an error, else the first exception.

        Args:
            raised: by Ray Train's `fit`.
        """
        final = self.final_failure
        if final is not None:
            return final
        reported: Mapping[int, Exception] = getattr(raised, "worker_failures", {})
        silent = sorted(rank for rank in reported if rank not in self._failures)
        first = next(iter(self._failures.values()), None)
        known: PenstockError | None = None
        details: list[str] = []
        if silent:
            after = "before a step was done" if self._step is None else f"after step {self._step:,}"
            died = f"the process of rank {silent[0]} died {after}"
            cause = f"{died}: it crashed, or it was killed (by hand, or for its memory)"
            lines = [line.strip() for line in str(reported[silent[0]]).splitlines()]
            details = [line for line in lines if line and _LOGS not in line][:3]
        elif first is not None:
            lines = first.text.strip().splitlines()
            cause, details = f"rank {first.rank}: {lines[-1]}", lines[-7:-1]
            if isinstance(first.error, PenstockError):  # a restart could have helped
                known = first.error
                cause, details = f"rank {first.rank}: {known.message}", list(known.problems)
        else:
            cause = f"{type(raised).__name__}: {raised}"
        if self._blamed:  # the error is of a rank that waited for the stuck one
            details = [f"in the end {cause}", *details]
            cause, known = f"no step was done while {self._blamed}", None
        others = len({*reported, *self._failures}) - 1
        more = f" ({others} other rank{'s' if others > 1 else ''} failed with it)" if others > 0 else ""
        tries = f" after {self._restarts} restart{'s' if self._restarts > 1 else ''}" if self._restarts else ""
        kind = ServiceError if isinstance(known, ServiceError) else TrainingError
        again = "run the same command again; it continues from the newest checkpoint, or begins anew if there is none"
        next_step = known.next_step if known is not None and known.next_step else again
        failed = kind(f"training failed{tries}: {cause}{more}", problems=details, next_step=next_step)
        failed.retried = True
        return failed
