"""Keys of a space are compared with the file, and with the recipe, before a trial begins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.errors import PreflightError, SpecError
from penstock.flows.spec_file import as_override, load_spec
from penstock.flows.tune.flow import _shared
from penstock.flows.tune.space import check_space, load_trial
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
        ("train.batch_rows: {range: [2, 33]}", "tune.space.train.batch_rows: 33 does not divide over 2"),
        ("preprocess.7.drop: {choice: [1]}", "preprocess.7 is not an index of a list of 2"),
        ("train.epochs: {choice: [3, yes]}", "tune.space.train.epochs: True: this is a number"),
        ("shuffle.seed: {choice: [x]}", "tune.space.shuffle.seed: 'x': input should be a valid integer"),
    ],
)
def test_space_names_a_bad_key_or_value(tmp_path: Path, space: str, says: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_space(load_spec(with_space(tmp_path, space)))
    (problem,) = refused.value.problems
    assert says in problem


def test_space_names_an_unknown_recipe_parameter(tmp_path: Path) -> None:
    loaded = load_spec(with_space(tmp_path, "train.params.pause: {choice: [1]}"))
    with pytest.raises(SpecError) as refused:
        check_space(loaded)
    assert refused.value.problems[0].startswith("tune.space.train.params.pause: ")
    check_space(load_spec(with_space(tmp_path / "right", "train.params.pause_s: {range: [0, 0.5]}")))


def test_bad_set_option_is_named_in_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = with_space(tmp_path, "shuffle.seed: {choice: [1, 2]}")
    with pytest.raises(SpecError) as refused:
        check_space(load_spec(file, ["tune.space={train.params.pause: {choice: [1]}}"]))
    assert refused.value.next_step.startswith("correct the --set options or edit pipeline.yaml, then: penstock check ")


@pytest.mark.parametrize("searcher", ["grid", "random"])
def test_sweep_without_optuna_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searcher: str) -> None:
    loaded = load_spec(with_space(tmp_path, "shuffle.seed: {choice: [1, 2]}"), [f"tune.searcher={searcher}"])
    check_space(loaded)
    monkeypatch.setitem(sys.modules, "optuna", None)  # as where it is not installed
    with pytest.raises(PreflightError, match="a sweep needs Optuna") as refused:
        check_space(loaded)
    assert refused.value.next_step == "pip install 'penstock[tune]'"


@pytest.mark.parametrize("value", [1e-05, 3, "1e-3", True, None, {"a": [1, "x: y"]}, "no", "ä"])
def test_override_keeps_the_value(tmp_path: Path, value: object) -> None:
    loaded = load_spec(make_project(tmp_path / "project", files=1))
    assert as_override("train.params.x", value).startswith("train.params.x=")
    assert load_trial(loaded, {"train.params.x": value}).spec.train.params == {"x": value}


def test_trials_with_equal_rows_share_keys(tmp_path: Path) -> None:
    loaded = load_spec(make_project(tmp_path / "project", files=2))

    def prepared(**values: object) -> list[str]:
        spec = load_trial(loaded, {key.replace("__", "."): value for key, value in values.items()})
        project = spec.project
        keys = stage_keys(project, Ledger(project.storage).stage_output)
        return [keys[stage].key for stage in BEFORE_TRAINING]

    same = prepared(train__learning_rate=0.1)
    assert prepared(train__learning_rate=0.2, train__epochs=9) == same, "no value of training prepares rows anew"
    assert prepared(shuffle__seed=6)[:-1] == same[:-1] and prepared(shuffle__seed=6) != same, "another order of the same rows"
    fewer = prepared(data__validation__fraction=0.1, train__learning_rate=0.1)
    assert not set(fewer) & set(same), "other rows"
    assert prepared(data__validation__fraction=0.1, train__learning_rate=0.2) == fewer, "shared by those that have them"


def test_recorded_sweep_is_compared_by_all_but_its_limits(tmp_path: Path) -> None:
    file = with_space(tmp_path, "shuffle.seed: {choice: [1, 2]}")

    def swept(*overrides: str) -> str:
        """What trials share, by the record of the sweep's run."""
        loaded = load_spec(file, overrides)
        ledger = Ledger(loaded.project.storage)
        run = ledger.new_run("drill", loaded.spec.model_dump(mode="json", by_alias=True))
        run = run.model_copy(update={"keys": stage_keys(loaded.project, ledger.stage_output)})
        ledger.save_run(run)
        recorded = ledger.load_run(run.run)
        assert recorded is not None and _shared(recorded.spec, recorded.keys) == _shared(run.spec, run.keys)
        return _shared(recorded.spec, recorded.keys)

    same = swept()
    assert swept("tune.trials=30", "tune.time_s=5", "tune.concurrent=1") == same, "these continue it"
    for change in ("tune.space={shuffle.seed: {choice: [1, 3]}}", "tune.seed=1", "train.epochs=9", "shuffle.seed=9"):
        assert swept(change) != same, change
