"""Keys of a space are compared with the file, and with the recipe, before a trial begins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.errors import PreflightError, SpecError
from penstock.flows.spec_file import as_override, load_spec
from penstock.flows.tune.folds import with_folds
from penstock.flows.tune.space import check_space, load_trial
from penstock.flows.verbs.init import create_project
from penstock.tasks.project import Project
from penstock.tasks.records.keys import stage_keys
from penstock.tasks.records.ledger import Ledger
from penstock.tasks.stages import BEFORE_TRAINING
from tests.drills.project import make_project


def with_space(folder: Path, space: str) -> Path:
    file = make_project(folder / "project", files=1, workers=2)
    file.write_text(f"{file.read_text()}tune:\n  space:\n    {space}\n")
    return file


@pytest.mark.parametrize(
    ("space", "says"),
    [
        ("train.lerning_rate: {choice: [1]}", "tune.space.train.lerning_rate: unknown key; did you mean 'learning_rate'?"),
        ("train.batch_rows: {range: [2, 33]}", "tune.space.train.batch_rows: train.batch_rows: 33 does not divide over 2"),
        ("preprocess.7.drop: {choice: [1]}", "preprocess.7 is not an index of a list of 2"),
        ("shuffle.seed: {choice: [x]}", "tune.space.shuffle.seed: 'x': input should be a valid integer"),
        (
            "shuffle.seed: {choice: [1, 2, 3, 4]}\n  scheduler: pbt",
            "scheduler: pbt hands weights on, so that it changes values of `train` alone; shuffle.seed is none",
        ),
    ],
)
def test_a_key_or_value_that_the_file_does_not_take_is_named(tmp_path: Path, space: str, says: str) -> None:
    with pytest.raises(SpecError) as refused:
        load_spec(with_space(tmp_path, space))
    (problem,) = refused.value.problems
    assert says in problem


def test_a_parameter_that_the_recipe_does_not_take_is_named(tmp_path: Path) -> None:
    loaded = load_spec(with_space(tmp_path, "train.params.pause: {choice: [1]}"))
    with pytest.raises(SpecError) as refused:
        check_space(loaded)
    assert refused.value.problems[0].startswith("tune.space.train.params.pause: ")
    check_space(load_spec(with_space(tmp_path / "right", "train.params.pause_s: {range: [0, 0.5]}\n  scheduler: pbt")))


def test_what_a_set_option_asks_of_a_sweep_is_blamed_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = with_space(tmp_path, "shuffle.seed: {choice: [1, 2]}")
    with pytest.raises(SpecError) as refused:
        check_space(load_spec(file, ["tune.space={train.params.pause: {choice: [1]}}"]))
    assert refused.value.next_step.startswith("correct the --set options, or edit pipeline.yaml; then: penstock check ")
    monkeypatch.setitem(sys.modules, "optuna", None)  # as where it is not installed
    with pytest.raises(PreflightError, match=r"^--set tune\.searcher=optuna: tune\.searcher: optuna cannot be used"):
        check_space(load_spec(file, ["tune.searcher=optuna"]))
    file.write_text(f"{file.read_text()}  searcher: optuna\n")
    with pytest.raises(PreflightError, match=r"^pipeline\.yaml:\d+: tune\.searcher: optuna cannot be used"):
        check_space(load_spec(file))


def test_a_framework_that_takes_no_weights_has_no_population(tmp_path: Path) -> None:
    create_project(tmp_path / "trees", "boosted")
    file = tmp_path / "trees" / "pipeline.yaml"
    file.write_text(f"{file.read_text()}tune: {{space: {{train.params.eta: {{range: [0.1, 0.5]}}}}, scheduler: pbt}}\n")
    with pytest.raises(SpecError) as refused:
        check_space(load_spec(file))
    (problem,) = refused.value.problems
    assert problem.startswith("tune.scheduler: pbt: train.start_from: ") and "does not read it" in problem


@pytest.mark.parametrize("value", [1e-05, 3, "1e-3", True, None, {"a": [1, "x: y"]}, "no", "ä"])
def test_a_value_is_the_same_after_it_was_written(tmp_path: Path, value: object) -> None:
    loaded = load_spec(make_project(tmp_path / "project", files=1))
    assert as_override("train.params.x", value).startswith("train.params.x=")
    assert load_trial(loaded, {"train.params.x": value}).spec.train.params == {"x": value}


def test_folds_become_a_sweep_over_each_of_them_and_are_asked_for_where_there_are_none(tmp_path: Path) -> None:
    file = make_project(tmp_path / "project", files=1)
    with pytest.raises(SpecError, match=r"has no data\.folds"):
        with_folds(load_spec(file))
    tune = with_folds(load_spec(file, ["data.folds=4", "data.validation=null"])).spec.tune
    assert tune is not None and tune.limit == 4
    assert tune.space["data.fold"].options == [0, 1, 2, 3] and tune.metric == "val/loss"


def test_trials_whose_values_give_the_same_rows_share_them(tmp_path: Path) -> None:
    loaded = load_spec(make_project(tmp_path / "project", files=2))

    def prepared(**values: object) -> list[str]:
        spec = load_trial(loaded, {key.replace("__", "."): value for key, value in values.items()})
        project = Project(spec.spec, spec.base_dir, spec.origins)
        keys = stage_keys(project, Ledger(project.storage).stage_output)
        return [keys[stage].key for stage in BEFORE_TRAINING]

    same = prepared(train__learning_rate=0.1)
    assert prepared(train__learning_rate=0.2, train__epochs=9) == same, "no value of training prepares rows anew"
    assert prepared(shuffle__seed=6)[:-1] == same[:-1] and prepared(shuffle__seed=6) != same, "another order of the same rows"
    fewer = prepared(data__validation__fraction=0.1, train__learning_rate=0.1)
    assert not set(fewer) & set(same), "other rows"
    assert prepared(data__validation__fraction=0.1, train__learning_rate=0.2) == fewer, "shared by those that have them"
