"""Is the section `tune` checked like the rest of the file, and every value that it names tried in it?"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.flows.spec_file import load_spec
from tests.flows.test_spec_file import GOOD, problems_of, write


@pytest.mark.parametrize(
    ("metric", "wrong", "right"), [("accuracy", "min", "max"), ("r2", "min", "max"), ("loss", "max", "min")]
)
def test_mode_that_prefers_the_worst_is_refused(tmp_path: Path, metric: str, wrong: str, right: str) -> None:
    entry = "tune={metric: val/%s, mode: %s, space: {train.epochs: {choice: [1, 2]}}}"
    assert load_spec(write(tmp_path, GOOD), [entry % (metric, right)])
    (problem,) = problems_of(write(tmp_path, GOOD), entry % (metric, wrong))
    assert f"tune.mode: 'val/{metric}' is better the " in problem and problem.endswith(f"write mode: {right}")


def test_sweep_without_validation_split_is_refused(tmp_path: Path) -> None:
    space = "tune: {space: {train.epochs: {choice: [1, 2]}}}\n"
    found = problems_of(write(tmp_path, GOOD + space), "data.validation=null")
    assert any("tune.metric: 'val/loss' needs a validation split; set data.validation" in each for each in found)


def test_metric_of_a_recipe_is_of_validation_a_loop_names_its_own(tmp_path: Path) -> None:
    entries = [
        "tune={metric: accuracy, mode: max, space: {train.params.a: {choice: [1]}}}",
        "train.checkpoint.best={metric: accuracy, mode: max}",
    ]
    (tmp_path / "loop.py").write_text("def train_func(config):\n    pass\n")
    file = write(tmp_path, GOOD)
    assert {problem.split(": ", 2)[1] for problem in problems_of(file, *entries)} == {
        "tune.metric",
        "train.checkpoint.best.metric",
    }
    assert load_spec(file, ["train={loop: loop.py:train_func, params: {a: 1}}", *entries])


def test_problem_of_the_section_names_its_line(tmp_path: Path) -> None:
    space = "tune: {space: {train.learning_rate: {range: [0.1, 1]}}}\n"
    (found,) = problems_of(write(tmp_path, GOOD + space), "tune.searcher=grid", "train.epochs=3")
    assert found.startswith("pipeline.yaml:11: tune: searcher: grid goes through lists")
    assert problems_of(write(tmp_path, GOOD), "tune.searcher=tpe") == [
        "pipeline.yaml: tune.space: missing; this key is required"
    ]


def test_boolean_in_place_of_a_number_is_refused(tmp_path: Path) -> None:
    (found,) = problems_of(write(tmp_path, GOOD + "tune: {space: {train.epochs: {range: [no, 3]}}}\n"))
    assert "tune.space.train.epochs.range.0: " in found and "this is a number" in found
