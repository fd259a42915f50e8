"""Values of the next trial depend on the spec and the trials before it, and on nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from penstock.tasks.tune.record import Trial
from penstock.tasks.tune.search import propose
from penstock.tasks.tune.spec import TuneSpec


def proposals(spec: TuneSpec, value: float | None = None) -> list[dict[str, Any]]:
    trials: list[Trial] = []
    while (values := propose(spec, trials)) is not None:
        trials.append(Trial(number=len(trials) + 1, values=values, value=value))
    return [trial.values for trial in trials]


SPACE = {
    "a": {"log_range": [1e-4, 1e-1]},
    "b": {"range": [3, 5]},
    "c": {"choice": [{"x": 1}, "y"]},
    "d": {"log_range": [1, 64]},
    "e": {"range": [0, 0.5]},
}


def test_grid_changes_the_last_key_fastest() -> None:
    spec = TuneSpec.model_validate({"space": {"a": {"choice": [1, 2]}, "b": {"choice": ["x", "y", "z"]}}, "searcher": "grid"})
    assert [tuple(each.values()) for each in proposals(spec)] == [(1, "x"), (1, "y"), (1, "z"), (2, "x"), (2, "y"), (2, "z")]
    assert len(proposals(spec.model_copy(update={"trials": 4}))) == 4


@pytest.mark.parametrize("searcher", ["random", "tpe"])
def test_proposals_fit_the_space_differ_and_repeat(searcher: str) -> None:
    spec = TuneSpec.model_validate({"space": SPACE, "searcher": searcher, "trials": 20, "seed": 3})
    drawn = proposals(spec, 0.5)
    assert drawn == proposals(spec, 0.5)
    assert len({str(each) for each in drawn}) == 20
    for each in drawn:
        assert list(each) == list(SPACE)
        assert 1e-4 <= each["a"] <= 1e-1 and each["b"] in (3, 4, 5) and each["c"] in ({"x": 1}, "y")
        assert isinstance(each["d"], int) and 1 <= each["d"] <= 64 and 0 <= each["e"] <= 0.5
    assert {each["b"] for each in drawn} == {3, 4, 5}
    assert proposals(spec.model_copy(update={"seed": 4}), 0.5) != drawn


def test_raised_limit_begins_with_the_same_trials() -> None:
    spec = TuneSpec.model_validate({"space": SPACE, "trials": 4})
    assert proposals(spec.model_copy(update={"trials": 7}))[:4] == proposals(spec)


def test_exhausted_space_ends_the_sweep() -> None:
    spec = TuneSpec.model_validate({"space": {"a": {"choice": [1, 2, 3]}}, "trials": 10})
    assert sorted(each["a"] for each in proposals(spec)) == [1, 2, 3]


def test_tpe_proposes_nearer_to_the_best() -> None:
    spec = TuneSpec.model_validate({"space": {"a": {"range": [0, 1.0]}}, "searcher": "tpe", "trials": 40})
    trials: list[Trial] = []
    while (values := propose(spec, trials)) is not None:
        trials.append(Trial(number=len(trials) + 1, values=values, value=abs(values["a"] - 0.3)))
    distances = [trial.value or 0 for trial in trials]
    assert sum(distances[-20:]) < sum(distances[:20])


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"space": {"a": {"choice": [1], "range": [1, 2]}}}, "choice and range"),
        ({"space": {"a": {}}}, "has none"),
        ({"space": {"a": {"range": [2, 1]}}}, "2 is not below 1"),
        ({"space": {"a": {"log_range": [0, 1]}}}, "begins above 0"),
        ({"space": {"a": {"range": [1, 2]}}, "searcher": "grid"}, "goes through lists; give `choice:"),
        ({"space": {"name": {"choice": ["x"]}}}, "name cannot be tuned"),
        ({"space": {"train.workers": {"choice": [1, 4]}}}, "train.workers cannot be tuned: it is the same for all trials"),
        ({"space": {"train.resources.TPU": {"choice": [1, 4]}}}, "train.resources.TPU cannot be tuned"),
        ({"space": {"train.params": {"choice": [{}]}, "train.params.x": {"choice": [1]}}}, "are both in the space"),
        ({"space": {"a": {"range": [1, 9]}}, "scheduler": "pbt"}, "Input should be 'none', 'asha' or 'median'"),
    ],
)
def test_contradictory_section_is_refused(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        TuneSpec.model_validate(section)
