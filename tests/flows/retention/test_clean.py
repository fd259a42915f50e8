"""`penstock clean`: what it says, what it takes from the file, and whose models it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from penstock.errors import ServiceError, SpecError
from penstock.flows.retention.clean import clean_pipeline
from penstock.lease import hold_lease
from penstock.storage import Storage
from penstock.tasks.records.ledger import Ledger, run_leases
from penstock.training.registry.registry import REGISTRIES, WEIGHTS_TAG, KeepsAliases
from penstock.training.tracking.mlflow_backend import connect
from tests.tasks.retention.recorded_nights import nights

PIPELINE = """\
name: p
storage: state
data: {format: parquet, train: train/, label: y}
train: {recipe: model.py:Net, batch_rows: 8}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A pipeline file with three nights behind it, which registered a model each."""
    nights(Storage(str(tmp_path / "state")), tmp_path, 3)
    (tmp_path / "pipeline.yaml").write_text(PIPELINE)
    return tmp_path / "pipeline.yaml"


def cleaned(file: Path, *keep: Any, dry_run: bool = False) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    result = clean_pipeline(file, *(keep or (None, None)), dry_run=dry_run, report=said.append)
    return json.loads(json.dumps(result)), said


def names(result: dict[str, Any], kind: str) -> list[str]:
    return [each["name"] for each in result["freed"] if each["kind"] == kind]


def test_dry_run_lists_what_clean_frees_and_changes_nothing(file: Path) -> None:
    state = Storage(str(file.parent / "state"))
    before = state.tree()
    told, said = cleaned(file, 1, None, dry_run=True)
    assert state.tree() == before
    result, _ = cleaned(file, 1, None)
    assert told["freed"] == result["freed"] and told["freed_bytes"] == result["freed_bytes"] > 5000
    assert names(result, "run") == ["r01", "r02"] and told["kept"] == [{"run": "r03", "why": "the newest run"}]
    assert "goes   r01: last worked on " in "\n".join(said) and said[-1].startswith("would free 0.0 MB: 2 runs")


def test_command_options_override_file(file: Path) -> None:
    assert cleaned(file, dry_run=True)[0]["keep_runs"] == 5
    file.write_text(PIPELINE + "retention: {keep_runs: 2}\n")
    assert names(cleaned(file, dry_run=True)[0], "run") == ["r01"]
    assert names(cleaned(file, 3, None, dry_run=True)[0], "run") == []


def test_keep_days_of_0_keep_the_newest_run_alone(file: Path) -> None:
    assert cleaned(file, None, 0)[0]["kept"] == [{"run": "r03", "why": "the newest run"}]


@pytest.mark.parametrize(("days", "words"), [(float("nan"), "finite number"), (float("inf"), "finite number"), (1e6, "36500")])
def test_keep_days_must_be_a_number_of_days(file: Path, days: float, words: str) -> None:
    with pytest.raises(SpecError, match=f"retention.keep_days.*{words}"):
        cleaned(file, None, days)


def test_run_whose_model_has_an_alias_stays(file: Path) -> None:
    ledger = Ledger(Storage(str(file.parent / "state")))
    for number in (1, 2, 3):
        run = ledger.load_run(f"r0{number}")
        assert run is not None
        ledger.save_run(run.model_copy(update={"result": {"model_uri": f"models:/m/{number}"}}))
    client = MlflowClient(REGISTRIES.get("mlflow").default_uri(file.parent / ".penstock"))
    client.create_registered_model("m")
    for number in (1, 2, 3):
        client.create_model_version("m", source=f"file:///somewhere/{number}")
    client.set_registered_model_alias("m", "champion", "1")  # by a person: penstock has no note of it
    result, _ = cleaned(file, 1, None)
    assert {each["run"]: each["why"] for each in result["kept"]} == {"r01": "its model is m@champion", "r03": "the newest run"}
    assert names(result, "run") == ["r02"]
    client.set_registered_model_alias("m", "champion", "3")
    assert names(cleaned(file, 1, None)[0], "run") == ["r01"]


def test_rolled_back_version_is_known_after_a_cleaning(file: Path) -> None:
    ledger, registry = Ledger(Storage(str(file.parent / "state"))), REGISTRIES.get("mlflow")
    assert isinstance(registry, KeepsAliases)
    uri = registry.default_uri(file.parent / ".penstock")
    client, experiment = connect(uri, "p")
    client.create_registered_model("m")
    for number in (1, 2, 3):
        model = client.create_logged_model(experiment, "m", tags={WEIGHTS_TAG: f"weights-{number}"})
        client.create_model_version("m", model.artifact_location)
        registry.give_alias(uri, "m", "champion", str(number))
        if number == 2:
            assert registry.roll_back(uri, "m", "champion") == ("1", "2")
        run = ledger.load_run(f"r0{number}")
        assert run is not None
        ledger.save_run(run.model_copy(update={"result": {"model_uri": f"models:/m/{number}"}}))
    result, _ = cleaned(file, 1, None)
    assert names(result, "run") == ["r02"], "`champion` is version 3, `champion-previous` is version 1"
    assert registry.rolled_back(uri, "m", "champion", "weights-2") is not None
    assert {version.version for version in client.search_model_versions("name = 'm'")} == {1, 2, 3}


def test_clean_reports_why_prepared_rows_stay(file: Path) -> None:
    storage = Storage(str(file.parent / "state"))
    with hold_lease(storage, f"{run_leases('other')}/x"):
        result, said = cleaned(file, 1, None)
    assert {each["kind"] for each in result["freed"]} == {"run"}
    assert result["rows_stay"].startswith("run x is at work: ") and f"stays  prepared rows: {result['rows_stay']}" in said


@pytest.mark.drill  # the registry is asked for ten seconds
def test_registry_that_is_away_stops_clean(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = Storage(str(file.parent / "state"))
    run = Ledger(state).load_run("r01")
    assert run is not None
    Ledger(state).save_run(run.model_copy(update={"result": {"model_uri": "models:/m/1"}}))
    before = state.tree()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(ServiceError, match="cannot look up the aliases of 'm'"):
        cleaned(file, 1, None)
    assert state.tree() == before
