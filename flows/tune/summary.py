"""What has come of a sweep so far, in words? From the records of its trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.messages import counted
from penstock.tasks.records.ledger import Ledger, Run
from penstock.tasks.tune.record import Trial, load_trials

__all__ = ["best_of", "describe_sweeps", "describe_trials", "short"]

_STATES = {"done": "done", "stopped": "stopped early", "failed": "failed", "running": "cut"}


def describe_sweeps(ledger: Ledger, runs: Iterable[Run]) -> dict[str, dict[str, Any]]:
    """Run -> `sweep`: states, best and summary, of each sweep among `runs`; `trial`: number and end, of each of its trials."""
    found: dict[str, dict[str, Any]] = {}
    for run in (run for run in runs if run.sweep == run.run):
        trials, live = load_trials(ledger.storage, run.run), run.status == "running"
        section = run.spec.get("tune") or {}
        metric = str(section.get("metric", "val/loss"))
        best = best_of(str(section.get("mode", "min")), trials)
        summary = describe_trials(metric, trials, best, live=live)
        states = _states(trials, live=live)
        shown = {"trials": len(trials), "states": dict(Counter(states)), "metric": metric, "summary": summary}
        found[run.run] = {"sweep": {**shown, "best": None if best is None else _fields(best)}}
        for trial, state in zip(trials, states, strict=True):
            if (trial.run or "").startswith(run.run):  # another one was trained before this sweep
                note = trial.note or (f"{metric} {short(trial.value)}" if trial.value is not None else "")
                about = {**_fields(trial), "sweep": run.run, "state": state, "note": note, "best": trial is best}
                found[str(trial.run)] = {"trial": about}
    return found


def best_of(mode: str, trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the best value among those that are done: the first of several."""
    sign = -1 if mode == "max" else 1
    done = [(sign * trial.value, trial.number, trial) for trial in trials if trial.state == "done" and trial.value is not None]
    return min(done)[2] if done else None


def describe_trials(metric: str, trials: Sequence[Trial], best: Trial | None, *, live: bool = False) -> str:
    """Describe in a line how many trials there are, how they ended, and the best.

    Args:
        live: a process works on those that have not ended.
    """
    states = Counter(_states(trials, live=live))
    ended = ", ".join(f"{states[state]} {state}" for state in (*_STATES.values(), "running") if state in states)
    counts = counted(len(trials), "trial") + (f" ({ended})" if ended else "")
    if best is None:
        return counts
    values = ", ".join(f"{key} {short(value)}" for key, value in best.values.items())
    return f"{counts}; the best is trial {best.number}: {metric} {short(best.value)} with {values}"


def short(value: Any) -> str:
    """Format a value of the space in few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _fields(trial: Trial) -> dict[str, Any]:
    return {"number": trial.number, "run": trial.run, "values": trial.values, "value": trial.value}


def _states(trials: Sequence[Trial], *, live: bool) -> list[str]:
    """Return how each trial has ended; one without a process was cut, and continues with the next command."""
    return ["running" if live and trial.state == "running" else _STATES[trial.state] for trial in trials]
