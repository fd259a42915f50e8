"""Which trials are ended early? Ray Tune's own rules, told of the reports one by one.

Their state is never saved: a sweep that goes on after a kill tells them all reports again, in their order, and they decide the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.tasks.tune.record import Report, Trial
from penstock.tasks.tune.spec import TuneSpec

__all__ = ["EarlyStop"]

_NEVER = 1_000_000
"""Validations; a trial has fewer."""


@dataclass(frozen=True)
class _RayTrial:
    """What the rules look at of a trial."""

    trial_id: str


class _NoOthers:
    """Stands for Ray Tune's controller: no trial waits, so none is paused for another."""

    def get_live_trials(self) -> list[Any]:
        return []


class EarlyStop:
    """Hears reports and says which trials end. With `trials` it first hears theirs, in the order they came."""

    def __init__(self, spec: TuneSpec, trials: Sequence[Trial] = ()) -> None:
        self._spec = spec
        self._scheduler = _scheduler_of(spec)
        self._heard: dict[int, int] = {}
        self.stopped: set[int] = set()
        """Numbers of the trials that were to end."""
        reports = [(report, trial.number) for trial in trials for report in trial.reports]
        for report, number in sorted(reports, key=lambda each: each[0].order):
            self.hear(number, report)

    def hear(self, number: int, report: Report) -> bool:
        """Take in a report of the trial of that number. Returns whether it ends now."""
        if self._scheduler is None or number in self.stopped:
            return False
        ray_trial, first = _RayTrial(str(number)), number not in self._heard
        self._heard[number] = self._heard.get(number, 0) + 1
        if first:
            self._scheduler.on_trial_add(_NoOthers(), ray_trial)
        result = {"validations": self._heard[number], "value": report.value}
        if self._scheduler.on_trial_result(_NoOthers(), ray_trial, result) == "STOP":
            self.stopped.add(number)
            return True
        return False

    def why(self, trial: Trial) -> str:
        """Why it was stopped, in a sentence."""
        last, validations = trial.reports[-1], len(trial.reports)
        rule = {
            "asha": f"outside the best 1 in {self._spec.reduction} of its rung",
            "median": "its best value is worse than the median of the others",
        }[self._spec.scheduler]
        return (
            f"stopped early by {self._spec.scheduler} after {validations} validation{'s' * (validations > 1)} at step "
            f"{last.step:,}, where {self._spec.metric} was {last.value:.4g}: {rule}"
        )


def _scheduler_of(spec: TuneSpec) -> Any:
    if spec.scheduler in ("none", "pbt"):
        return None
    # Loading Ray Tune takes two seconds.
    from ray.tune.schedulers import AsyncHyperBandScheduler, MedianStoppingRule

    common: dict[str, Any] = {"time_attr": "validations", "metric": "value", "mode": spec.mode, "grace_period": spec.grace}
    if spec.scheduler == "median":
        return MedianStoppingRule(**common)
    return AsyncHyperBandScheduler(**common, max_t=_NEVER, reduction_factor=spec.reduction)
