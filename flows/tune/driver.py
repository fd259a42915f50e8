"""Which trial runs next, which ends early, and when is the sweep over? One loop that takes messages from the trials' threads.

The record of a trial is written before it begins, with every report before the scheduler's decision is acted on, and at its
end: a process that dies on any line leaves what the next command needs to go on.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from prefect import State, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Cancelled, Completed, Failed
from prefect.utilities.annotations import quote

from penstock.flows.tune.board import Board
from penstock.flows.tune.summary import short
from penstock.flows.tune.trial import Hears, Sweep, close_stopped, perform_trial
from penstock.machine.stopping import StopRequest
from penstock.tasks.tune.early_stop import EarlyStop
from penstock.tasks.tune.population import generation_before
from penstock.tasks.tune.record import Report, Trial, load_trials, save_trial
from penstock.tasks.tune.search import propose
from penstock.tasks.tune.spec import TuneSpec

__all__ = ["Driver"]

_LOOK_EVERY_S = 0.3
_HEARD_WITHIN_S = 30.0


class _Reported(NamedTuple):
    number: int
    step: int
    value: float


class _Ended(NamedTuple):
    number: int
    end: Trial | BaseException


class _Asked(NamedTuple):
    """A trial waits until all reports before this message are heard."""

    heard: threading.Event


@dataclass
class _Work:
    """One trial for a Prefect task."""

    sweep: Sweep
    trial: Trial
    stopping: StopRequest
    inbox: queue.SimpleQueue[_Reported | _Ended | _Asked]


@task(name="trial", task_run_name="trial {number}", cache_policy=NO_CACHE, persist_result=False)
def _trial_task(work: _Work, number: int) -> State[Any]:
    try:
        end = perform_trial(work.sweep, work.trial, work.stopping)
    except BaseException as error:
        work.inbox.put(_Ended(number, error))
        raise
    work.inbox.put(_Ended(number, end))
    shown = f"{work.sweep.tune.metric} {end.value}" if end.value is not None else end.note
    if end.state == "running":
        return Cancelled(message="stopped; it continues with the next command")
    if end.state == "failed":
        return Failed(message=end.error)
    return Completed(name="Stopped early" if end.state == "stopped" else "Completed", message=shown)


class Driver:
    """Performs the trials of a sweep, some at once."""

    def __init__(self, sweep: Sweep, board: Board) -> None:
        self._sweep, self._board = sweep, board
        self._tune: TuneSpec = sweep.tune
        self._inbox: queue.SimpleQueue[_Reported | _Ended | _Asked] = queue.SimpleQueue()
        self._live: dict[int, StopRequest] = {}
        self._error: BaseException | None = None
        self.trials = load_trials(sweep.ctx.storage, sweep.ctx.run.run)
        self._early = EarlyStop(sweep.tune, self.trials)
        self._orders = max((report.order for trial in self.trials for report in trial.reports), default=0)
        sweep.hears = Hears(lambda *report: self._inbox.put(_Reported(*report)), board.progress, board.line)
        sweep.why_stopped = self._why_stopped

    @property
    def has_work(self) -> bool:
        """Whether a trial is left to train."""
        return any(trial.state == "running" for trial in self.trials) or propose(self._tune, self.trials) is not None

    def run(self, concurrent: int) -> None:
        """Perform what is left of the sweep, so many trials at once, in the driver's main thread.

        Raises:
            Interrupted: it was asked to stop; trials that were training have saved.
            PenstockError: what is no fault of a trial.
        """
        stopping, begun_s = self._sweep.ctx.stopping, time.monotonic()
        waiting = self._cut()
        for trial in self.trials:
            if trial.state != "running":
                self._board.event(f"trial {trial.number} is {trial.state} already: {self._result(trial)}")
        stopping.graceful = True
        try:
            while True:
                in_time = self._tune.time_s is None or time.monotonic() - begun_s < self._tune.time_s
                while len(self._live) < concurrent and not self._ends and (waiting or in_time):
                    verb, following = ("continues", waiting.pop(0)) if waiting else ("begins", self._next())
                    if following is None:
                        break
                    self._begin(following, verb)
                if not self._live:
                    break
                self._take()
        finally:
            stopping.graceful = False
        if self._error is not None:
            raise self._error
        stopping.check()

    @property
    def _ends(self) -> bool:
        return self._error is not None or self._sweep.ctx.stopping.stop.is_set()

    def _cut(self) -> list[Trial]:
        """Trials that a kill or a stop has cut; one that was to end early has ended."""
        for trial in self.trials:
            if trial.state == "running" and trial.number in self._early.stopped:
                self._keep(close_stopped(self._sweep, self._stopped(trial)))
        return [trial for trial in self.trials if trial.state == "running"]

    def _next(self) -> Trial | None:
        if any(trial.state == "running" for trial in generation_before(self._tune, self.trials)):
            return None
        values = propose(self._tune, self.trials)
        if values is None:
            return None
        number = len(self.trials) + 1
        return Trial(number=number, values=values, run=f"{self._sweep.ctx.run.run}-{number:03d}")

    def _begin(self, trial: Trial, verb: str) -> None:
        self._keep(trial)
        self._live[trial.number] = StopRequest()
        self._live[trial.number].graceful = True
        values = ", ".join(f"{key}={short(value)}" for key, value in trial.values.items())
        self._board.event(f"trial {trial.number} {verb}: {values}")
        work = _Work(self._sweep, trial, self._live[trial.number], self._inbox)
        _trial_task.submit(quote(work), trial.number)  # type: ignore[call-overload]  # what Prefect hands on is the work itself
        self._board.update(self.trials, set(self._live))

    def _take(self) -> None:
        """Wait a moment for a message, and do what it asks for."""
        try:
            message = self._inbox.get(timeout=_LOOK_EVERY_S)
        except queue.Empty:
            message = None
        if isinstance(message, _Reported):
            self._hear(message)
        elif isinstance(message, _Ended):
            self._end(message)
        elif isinstance(message, _Asked):
            message.heard.set()
        if self._ends:
            for stopping in self._live.values():
                stopping.stop.set()
        if self._sweep.ctx.stopping.lost is not None:
            raise self._sweep.ctx.stopping.lost

    def _hear(self, told: _Reported) -> None:
        if told.number in self._early.stopped:
            return  # on its way while the trial was being stopped: how far it came is chance
        self._orders += 1
        report = Report(order=self._orders, step=told.step, value=told.value)
        trial = self._trial(told.number)
        self._keep(trial.model_copy(update={"reports": [*trial.reports, report]}))
        if self._early.hear(told.number, report):
            self._live[told.number].stop.set()

    def _end(self, ended: _Ended) -> None:
        del self._live[ended.number]
        if not isinstance(ended.end, Trial):
            self._error = self._error or ended.end
            return
        trial = ended.end.model_copy(update={"reports": self._trial(ended.number).reports})
        if ended.number in self._early.stopped:
            trial = self._stopped(trial)
        self._keep(trial)
        self._board.update(self.trials, set(self._live))
        self._board.event(f"trial {trial.number} {trial.state}: {self._result(trial)}")

    def _stopped(self, trial: Trial) -> Trial:
        """A trial that ended early, with what it had reported when that was decided."""
        best = {"min": min, "max": max}[self._tune.mode](report.value for report in trial.reports)
        ended = {"state": "stopped", "value": best, "step": trial.reports[-1].step, "note": self._early.why(trial)}
        return trial.model_copy(update={**ended, "weights_digest": None, "metrics": {}})

    def _keep(self, trial: Trial) -> None:
        """Write the record, and remember it."""
        save_trial(self._sweep.ctx.storage, self._sweep.ctx.run.run, trial)
        self.trials[trial.number - 1 : trial.number] = [trial]

    def _trial(self, number: int) -> Trial:
        return self.trials[number - 1]

    def _why_stopped(self, number: int) -> str | None:
        """In the trial's thread. What it has reported is heard first; a driver that has gone hears nothing more."""
        asked = _Asked(threading.Event())
        self._inbox.put(asked)
        asked.heard.wait(_HEARD_WITHIN_S)
        return self._early.why(self._trial(number)) if number in self._early.stopped else None

    def _result(self, trial: Trial) -> str:
        if trial.state in ("failed", "stopped"):
            return trial.error or trial.note
        return f"{self._tune.metric} {trial.value:.4g} at step {trial.step:,}" if trial.value is not None else "to be continued"
