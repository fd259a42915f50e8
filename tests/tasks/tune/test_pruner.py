"""Optuna's pruners get the reports one by one, and again from the records after a kill."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.tasks.tune.record import Report, Trial
from penstock.tasks.tune.search import Pruner
from penstock.tasks.tune.spec import TuneSpec


def spec_of(scheduler: str, mode: str = "min") -> TuneSpec:
    section = {"space": {"a": {"choice": [1]}}, "scheduler": scheduler, "mode": mode, "reduction": 2}
    return TuneSpec.model_validate(section)


def swept(spec: TuneSpec, pruner: Pruner, numbers: range) -> list[Trial]:
    """Trials one after the other, of four validations each, that end near their number."""
    found = []
    for number in numbers:
        reports: list[Report] = []
        ended: dict[str, Any] = {"state": "done", "value": number + 0.25}
        for step in range(1, 5):
            reports.append(Report(step=10 * step, value=number + 1.0 / step))
            if pruner.report(number, len(reports), reports[-1].value):
                ended = {"state": "stopped", "value": reports[-1].value}
                break
        found.append(Trial(number=number, values={"a": number}, reports=reports, **ended))
        pruner.end(found[-1])
    return found


@pytest.mark.parametrize("scheduler", ["asha", "median"])
def test_worse_trials_stop_the_same_after_a_replay(scheduler: str) -> None:
    spec = spec_of(scheduler)
    trials = swept(spec, Pruner(spec), range(1, 9))
    states = [trial.state for trial in trials]
    assert states[0] == "done" and states[-1] == "stopped"
    first = states.index("stopped") if scheduler == "median" else 4
    assert swept(spec, Pruner(spec, trials[:first]), range(first + 1, 9)) == trials[first:]


def test_no_scheduler_stops_no_trial() -> None:
    spec = spec_of("none")
    assert {trial.state for trial in swept(spec, Pruner(spec), range(1, 9))} == {"done"}


def test_trial_without_a_number_counts_as_failed() -> None:
    spec = spec_of("median")
    lost = [Trial(number=number, values={"a": 1}, state="done", value=float("nan")) for number in range(1, 5)]
    assert {trial.state for trial in swept(spec, Pruner(spec, lost), range(5, 7))} == {"done"}, "there is no median of them"


def test_max_mode_keeps_the_higher_trials() -> None:
    spec = spec_of("asha", "max")
    assert {trial.state for trial in swept(spec, Pruner(spec), range(1, 9))} == {"done"}, "each is better than all before it"
