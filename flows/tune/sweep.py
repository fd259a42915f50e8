"""What do the trials of a sweep share? Their records, the prepared rows, and the decision which of them end early.

The record of a trial is written before it begins, with each report and the decision that follows from it, and at its end: a
process that dies on any line leaves what the next command needs to go on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import SpecError
from penstock.flows.spec_file import LoadedSpec
from penstock.flows.tune.summary import short
from penstock.machine.stopping import StopRequest
from penstock.messages import counted
from penstock.tasks.context import RunContext
from penstock.tasks.tune.record import Report, Trial, load_trials, save_trial
from penstock.tasks.tune.search import Pruner, propose
from penstock.tasks.tune.spec import TuneSpec
from penstock.training.events import Point

__all__ = ["Sweep"]


@dataclass
class Sweep:
    """The trials of a sweep, in any thread of the driver.

    Attributes:
        ctx: the attempt at the sweep's own run, whose rows most trials take.
        trials: all that have begun, by number from 1.
        live: number -> how a trial that is trained now is stopped.
        prepared: the key of a `shuffle` -> a context with the outcomes up to it.
        preparing: held while rows are prepared, so that no two trials prepare the same.
        unmeasured: the error that ends the sweep, once a trial has shown that none measures the metric.
    """

    loaded: LoadedSpec
    tune: TuneSpec
    ctx: RunContext
    trials: list[Trial] = field(init=False)
    live: dict[int, StopRequest] = field(default_factory=dict)
    prepared: dict[str, RunContext] = field(default_factory=dict)
    preparing: threading.Lock = field(default_factory=threading.Lock)
    unmeasured: SpecError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.trials = load_trials(self.ctx.storage, self.ctx.run.run)
        self._pruner = Pruner(self.tune, self.trials)
        self._lock = threading.RLock()

    @property
    def has_work(self) -> bool:
        """Whether a trial is left to train."""
        return any(trial.state == "running" for trial in self.trials) or propose(self.tune, self.trials) is not None

    def begin(self) -> Trial | None:
        """Record the next trial and return it; None if there is no other."""
        with self._lock:
            values, number = propose(self.tune, self.trials), len(self.trials) + 1
            if values is None:
                return None
            self.trials.append(Trial(number=number, values=values, run=f"{self.ctx.run.run}-{number:03d}"))
            return self.update(number)

    def update(self, number: int, **changes: Any) -> Trial:
        """Change the record of a trial, and write it."""
        with self._lock:
            if self.ctx.stopping.lost is not None:  # the records are another process's now
                raise self.ctx.stopping.lost
            trial = self.trials[number - 1] = self.trials[number - 1].model_copy(update=changes)
            save_trial(self.ctx.storage, self.ctx.run.run, trial)
            self._pruner.end(trial)
            return trial

    def report(self, number: int, points: Sequence[Point]) -> None:
        """Record new values of the metric, and stop the trial if it is to end early.

        Steps reported before an interruption are measured again and skipped.
        """
        with self._lock:
            for point in points:
                trial, value = self.trials[number - 1], point.values.get(self.tune.metric)
                if trial.note:  # it is being stopped: how far it comes until then is nondeterministic
                    return
                if value is None and "val/loss" in point.values and self.loaded.spec.train.loop is None:
                    self.lacks_metric(point.values)
                if self.unmeasured is not None:
                    self.live[number].stop.set()
                    return
                if value is None or (trial.reports and point.step <= trial.reports[-1].step):
                    continue
                reports = [*trial.reports, Report(step=point.step, value=value)]
                ends = self._pruner.report(number, len(reports), value)
                self.update(number, reports=reports, note=self._why(reports) if ends else "")
                if ends:
                    self.live[number].stop.set()

    def lacks_metric(self, measured: Iterable[str]) -> SpecError | None:
        """Return the error if a trial measured these without the metric; it ends the sweep if no trial has measured that."""
        loop = self.loaded.spec.train.loop is not None  # whose names need not begin with val/
        error = self.tune.unmeasured([name for name in sorted(measured) if loop or name.startswith("val/")])
        if not any(trial.reports or trial.state == "done" for trial in self.trials):
            self.unmeasured = error
        return error

    def end_early(self, number: int) -> Trial:
        """Record that a trial has ended early, with what it had reported when that was decided."""
        reports = self.trials[number - 1].reports
        best = {"min": min, "max": max}[self.tune.mode](report.value for report in reports)
        return self.update(number, state="stopped", value=best, step=reports[-1].step)

    def line(self, number: int, text: str) -> None:
        """Print a line about a trial."""
        self.ctx.reporter.report(f"trial {number}{text}")

    def describe(self, trial: Trial) -> str:
        """Describe the result of a trial."""
        if trial.state in ("failed", "stopped"):
            return trial.error or trial.note
        return f"{self.tune.metric} {trial.value:.4g} at step {trial.step:,}" if trial.value is not None else "to be continued"

    def title(self, trial: Trial) -> str:
        """Return the title of a trial for its description at the tracker."""
        values = ", ".join(f"{key} {short(value)}" for key, value in trial.values.items())
        return f"Trial {trial.number} of sweep {self.ctx.run.run} ({values})"

    def _why(self, reports: list[Report]) -> str:
        last, seen = reports[-1], counted(len(reports), "validation")
        where = f"at step {last.step:,}, where {self.tune.metric} was {last.value:.4g}"
        return f"stopped early by {self.tune.scheduler} after {seen} {where}"
