"""A generation follows from the results of the one before it, and from nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.tasks.tune.record import Trial
from penstock.tasks.tune.search import propose
from penstock.tasks.tune.spec import TuneSpec

SPACE = {
    "train.learning_rate": {"log_range": [1e-4, 1e-1]},
    "train.params.hidden": {"choice": [16, 32, 64]},
    "train.params.depth": {"range": [1, 9]},
}

SPEC = TuneSpec.model_validate({"space": SPACE, "scheduler": "pbt", "population": 8, "seed": 3})


def swept(spec: TuneSpec, result: Callable[[int], float | None]) -> list[Trial]:
    """All trials of a sweep, where the value of each is `result(number)`; None fails."""
    trials: list[Trial] = []
    while (values := propose(spec, trials)) is not None:
        number = len(trials) + 1
        value = result(number)
        trials.append(
            Trial(number=number, values=values, run=f"r{number}", value=value, state="failed" if value is None else "done")
        )
    return trials


def own(trial: Trial) -> dict[str, Any]:
    return {key: value for key, value in trial.values.items() if key in SPACE}


def test_the_worst_quarter_begins_with_weights_and_changed_values_of_the_best() -> None:
    trials = swept(SPEC, lambda number: float(number % 8))  # of each generation the eighth is best, the seventh worst
    assert len(trials) == 24, "three generations"
    assert all("train.start_from" not in trial.values for trial in trials[:8])
    for trial in trials[8:]:
        before = trials[trial.number - 9]
        if before.number % 8 not in (6, 7):
            assert trial.values == {**own(before), "train.start_from": f"run:{before.run}"}
            continue
        best = next(each for each in trials if trial.values["train.start_from"] == f"run:{each.run}")
        assert best.number % 8 in (0, 1) and (best.number - 1) // 8 == (before.number - 1) // 8
        assert own(trial) != own(best)
        assert 1e-4 <= trial.values["train.learning_rate"] <= 1e-1
        assert trial.values["train.params.hidden"] in (16, 32, 64)
        assert trial.values["train.params.depth"] in range(1, 10)
    assert swept(SPEC, lambda number: float(number % 8)) == trials, "nothing is remembered between two calls"


def test_where_higher_is_better_the_highest_hand_their_weights_on() -> None:
    trials = swept(SPEC.model_copy(update={"mode": "max", "trials": 16}), lambda number: float(number % 8))
    given = [trial.values["train.start_from"] for trial in trials[8:]]
    assert {given[0], given[7]} <= {"run:r6", "run:r7"} and given[1:7] == [f"run:r{number}" for number in range(2, 8)]


def test_trials_that_failed_are_replaced_and_a_generation_of_nothing_else_ends_the_sweep() -> None:
    trials = swept(SPEC.model_copy(update={"trials": 16}), lambda number: None if number < 6 else float(number))
    assert [trial.values["train.start_from"] in ("run:r6", "run:r7") for trial in trials[8:13]] == [True] * 5
    assert len(swept(SPEC, lambda _number: None)) == 8
