"""Ray Tune's rules, told of reports one by one, and again after a kill."""

from __future__ import annotations

import pytest

from penstock.tasks.tune.early_stop import EarlyStop
from penstock.tasks.tune.record import Report, Trial
from penstock.tasks.tune.spec import TuneSpec


def spec_of(scheduler: str, mode: str = "min") -> TuneSpec:
    section = {"space": {"a": {"choice": [1]}}, "scheduler": scheduler, "mode": mode, "reduction": 2}
    return TuneSpec.model_validate(section)


def curves() -> list[Trial]:
    """Trials of four validations each, one after the other, that end at 1, 2, 3, ..."""
    found, order = [], 0
    for number in range(1, 7):
        values = [number + 1.0 / step for step in range(1, 5)]
        reports = [Report(order=order + step, step=10 * step, value=value) for step, value in enumerate(values, start=1)]
        order += 4
        found.append(Trial(number=number, values={"a": number}, reports=reports))
    return found


@pytest.mark.parametrize("scheduler", ["asha", "median"])
def test_what_is_worse_ends_early_the_first_never_does_and_hearing_it_again_decides_the_same(scheduler: str) -> None:
    early = EarlyStop(spec_of(scheduler))
    ended: dict[int, int] = {}
    for trial in curves():
        for report in trial.reports:
            if trial.number not in ended and early.hear(trial.number, report):
                ended[trial.number] = report.step
    assert 1 not in ended and 6 in ended
    heard = [
        trial.model_copy(update={"reports": [each for each in trial.reports if each.step <= ended.get(trial.number, 99)]})
        for trial in curves()
    ]
    assert EarlyStop(spec_of(scheduler), heard[::-1]).stopped == ended.keys()
    assert early.why(heard[5]).startswith(f"stopped early by {scheduler} after ")


def test_without_a_scheduler_no_trial_ends_early() -> None:
    assert EarlyStop(spec_of("none"), curves()).stopped == set()


def test_where_higher_is_better_the_higher_ones_stay() -> None:
    assert EarlyStop(spec_of("asha", "max"), curves()).stopped == set(), "each is better than all before it"
