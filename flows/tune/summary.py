"""What has come of a sweep so far, in words? From the records of its trials."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from penstock.messages import counted
from penstock.tasks.records.ledger import Ledger, Run
from penstock.tasks.tune.record import Trial, load_trials

__all__ = ["SweepTrials", "best_of", "described_sweep", "described_trial", "short", "sweeps_in", "told_of_trials"]

_WORDS = {"done": "done", "stopped": "stopped early", "failed": "failed", "running": "cut"}


class SweepTrials(NamedTuple):
    """A sweep's own run, and the trials that it has begun."""

    run: Run
    trials: list[Trial]

    @property
    def metric(self) -> str:
        """What the trials are compared by."""
        return str(self._section.get("metric", "val/loss"))

    @property
    def best(self) -> Trial | None:
        """The best of those that are done; of folds there is none."""
        return None if self._are_folds else best_of(str(self._section.get("mode", "min")), self.trials)

    @property
    def told(self) -> str:
        """How many there are, how they ended, and the result so far."""
        if not self._are_folds:
            return told_of_trials(self.metric, self.trials, self.best, live=self.run.status == "running")
        values = [trial.value for trial in self.trials if trial.value is not None]
        mean = f": {self.metric} {statistics.fmean(values):.4g} on average" if len(values) == len(self.trials) > 0 else ""
        return _counts(self.trials, "fold", live=self.run.status == "running") + mean

    @property
    def _section(self) -> dict[str, Any]:
        return self.run.spec.get("tune") or {}

    @property
    def _are_folds(self) -> bool:
        return [*self._section.get("space", {})] == ["data.fold"]


def sweeps_in(ledger: Ledger, runs: Iterable[Run]) -> list[SweepTrials]:
    """The sweeps among the runs."""
    return [SweepTrials(run, load_trials(ledger.storage, run.run)) for run in runs if run.sweep == run.run]


def described_sweep(sweep: SweepTrials) -> dict[str, Any]:
    """How many trials a sweep has in each state, its best, and both in words."""
    states = [_state(trial, live=sweep.run.status == "running") for trial in sweep.trials]
    best = sweep.best
    value = None if best is None else {"trial": best.number, "run": best.run, "values": best.values, "value": best.value}
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    return {"trials": len(states), "states": counts, "metric": sweep.metric, "best": value, "told": sweep.told}


def described_trial(run: Run, sweeps: Sequence[SweepTrials]) -> dict[str, Any] | None:
    """Which trial of which sweep a run is, and how that ended; None for a run that was begun outside a sweep."""
    for sweep in sweeps:
        for trial in sweep.trials:
            if trial.run == run.run and run.run.startswith(sweep.run.run):  # a trial may have found a run from before
                state = _state(trial, live=sweep.run.status == "running")
                note = trial.note or (f"{sweep.metric} {short(trial.value)}" if trial.value is not None else "")
                is_best = sweep.best is not None and sweep.best.number == trial.number
                about = {"sweep": sweep.run.run, "number": trial.number, "values": trial.values, "state": state}
                return {**about, "value": trial.value, "note": note, "best": is_best}
    return None


def best_of(mode: str, trials: Sequence[Trial]) -> Trial | None:
    """The trial with the best value among those that are done: the first of several."""
    sign = -1 if mode == "max" else 1
    done = [(sign * trial.value, trial.number, trial) for trial in trials if trial.state == "done" and trial.value is not None]
    return min(done)[2] if done else None


def told_of_trials(metric: str, trials: Sequence[Trial], best: Trial | None, *, live: bool = False) -> str:
    """How many there are and how they ended, and the best.

    Args:
        live: a process works on those that have not ended.
    """
    counts = _counts(trials, "trial", live=live)
    if best is None:
        return counts
    values = ", ".join(f"{key} {short(value)}" for key, value in best.values.items())
    return f"{counts}; the best is trial {best.number}: {metric} {short(best.value)} with {values}"


def _state(trial: Trial, *, live: bool = False) -> str:
    """How a trial has ended; one without a process was cut, and continues with the next command."""
    return "running" if live and trial.state == "running" else _WORDS[trial.state]


def short(value: Any) -> str:
    """A value of the space in few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _counts(trials: Sequence[Trial], one: str, *, live: bool) -> str:
    states = [_state(trial, live=live) for trial in trials]
    ended = ", ".join(f"{states.count(word)} {word}" for word in dict.fromkeys([*_WORDS.values(), "running"]) if word in states)
    return counted(len(trials), one) + (f" ({ended})" if ended else "")
