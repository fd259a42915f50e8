"""`penstock clean`: what it says, what it takes from the file, and whose models it leaves alone."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect import flow
from prefect.client.orchestration import get_client
from rich.console import Console

from penstock.errors import ServiceError
from penstock.flows.servers.services import prefect_api
from penstock.flows.verbs.clean import clean_pipeline
from penstock.flows.verbs.log import collect_log
from penstock.flows.verbs.status import collect_status, show_status
from penstock.storage import Storage
from penstock.tasks.records.ledger import Ledger
from penstock.temporary import own_folder, user_folder
from penstock.training.registry.registries import REGISTRIES
from penstock.training.tracking.mlflow_backend import connect
from penstock.training.tracking.mlflow_files import CLEANED_TAG
from tests.tasks.room.recorded_nights import night, nights

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
    result = clean_pipeline(file, *(keep or (None, None)), dry_run=dry_run, say=said.append)
    return json.loads(json.dumps(result)), said


def names(result: dict[str, Any], kind: str) -> list[str]:
    return [each["name"] for each in result["freed"] if each["kind"] == kind]


def test_a_dry_run_says_what_a_cleaning_frees_and_changes_nothing(file: Path) -> None:
    state = Storage(str(file.parent / "state"))
    before = state.tree()
    told, said = cleaned(file, 1, None, dry_run=True)
    assert state.tree() == before
    result, _ = cleaned(file, 1, None)
    assert told["freed"] == result["freed"] and told["freed_bytes"] == result["freed_bytes"] > 5000
    assert names(result, "run") == ["r01", "r02"] and told["kept"] == [{"run": "r03", "why": "the newest run"}]
    assert "goes   r01: last worked on " in "\n".join(said) and said[-1].startswith("would free 0.0 MB: 2 runs")


def test_code_folders_of_processes_that_are_gone_go_and_that_of_a_living_one_stays(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    old, living = user_folder() / "penstock_user_1", user_folder() / "penstock_user_2"
    own_folder(old).close()
    (old / "model.py").write_text("x = 1\n")
    with own_folder(living):
        told, said = cleaned(file, dry_run=True)
        assert told["code_folders"] == [str(old)] and old.exists()
        assert f"goes   {old}: code of a process that is gone" in said
        assert cleaned(file)[0]["code_folders"] == [str(old)]
        assert [*user_folder().iterdir()] == [living]


def test_the_file_says_what_is_kept_unless_the_command_does(file: Path) -> None:
    assert cleaned(file, dry_run=True)[0]["keep_runs"] == 5
    file.write_text(PIPELINE + "retention: {keep_runs: 2}\n")
    assert names(cleaned(file, dry_run=True)[0], "run") == ["r01"]
    assert names(cleaned(file, 3, None, dry_run=True)[0], "run") == []


def test_a_run_whose_model_has_an_alias_stays(file: Path) -> None:
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


class Tracked:
    """Penstock's own MLflow folder beside a pipeline file, with what a night leaves there: artifacts, a model, a version."""

    def __init__(self, file: Path) -> None:
        self.ledger = Ledger(Storage(str(file.parent / "state")))
        self.folder = file.parent / ".penstock" / "mlflow"
        self.client, self.experiment = connect(REGISTRIES.get("mlflow").default_uri(file.parent / ".penstock"), "p")
        self.client.create_registered_model("m")

    def night(self, number: int) -> None:
        recorded, own = self.ledger.load_run(f"r{number:02d}"), self.client.create_run(self.experiment).info
        assert recorded is not None
        self.client.log_text(own.run_id, "f" * 3000, "evaluation/figure.png")
        self.client.log_metric(own.run_id, "test/accuracy", 0.5)
        model = self.client.create_logged_model(self.experiment, "m", source_run_id=own.run_id)
        (weights := self.folder / "model.safetensors").write_bytes(bytes(5000))
        self.client.log_model_artifact(model.model_id, str(weights))
        weights.unlink()
        self.client.finalize_logged_model(model.model_id, "READY")
        version = self.client.create_model_version("m", model.artifact_location, own.run_id).version
        found = {"tracking_runs": {"mlflow": own.run_id}, "result": {"model_uri": f"models:/m/{version}"}}
        self.ledger.save_run(recorded.model_copy(update=found))

    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.folder / "artifacts").rglob("*") if path.is_file())

    def versions(self) -> set[str]:
        return {str(version.version) for version in self.client.search_model_versions("name = 'm'")}


@pytest.fixture
def tracked(file: Path) -> Tracked:
    made = Tracked(file)
    for number in (1, 2, 3):
        made.night(number)
    return made


def test_what_mlflow_keeps_of_a_run_that_goes_goes_with_it_but_for_its_metrics(file: Path, tracked: Tracked) -> None:
    whole, stay = tracked.size_bytes(), [tracked.client.get_model_version("m", str(number)) for number in (1, 3)]
    tracked.client.set_registered_model_alias("m", "champion", "1")
    told, _ = cleaned(file, 1, None, dry_run=True)
    assert tracked.size_bytes() == whole and tracked.versions() == {"1", "2", "3"}
    result, said = cleaned(file, 1, None)
    assert told["freed_mlflow_bytes"] == result["freed_mlflow_bytes"] == 8000 == whole - tracked.size_bytes()
    assert "frees MLflow's files of 1 run, 1 version: 0.0 MB" in said
    assert tracked.versions() == {"1", "3"}
    for version in stay:
        assert Path(version.source.removeprefix("file://"), "model.safetensors").stat().st_size == 5000
    run = tracked.ledger.load_run("r02")
    assert run is not None
    assert tracked.ledger.storage.read_bytes("runs/r02/run.json").startswith(b"\x1f\x8b"), "it still takes little room"
    kept = tracked.client.get_run(run.tracking_runs["mlflow"])
    assert kept.data.metrics == {"test/accuracy": 0.5} and CLEANED_TAG in kept.data.tags
    assert cleaned(file, 1, None)[0]["freed_mlflow_bytes"] == 0
    error = "it broke\nNext: correct it, and run the same command again"
    for number in (1, 2, 3):
        (attempt,) = tracked.ledger.attempts(f"r{number:02d}")
        ended = {"status": "failed" if number == 2 else "done", "command": "penstock run p.yaml", "error": error}
        tracked.ledger.save_attempt(f"r{number:02d}", attempt.model_copy(update=ended))
    tracked.ledger.save_run(run.model_copy(update={"status": "failed"}))
    deleted = "models:/m/2 (deleted)"
    advice = "Next: penstock run p.yaml --fresh begins a new run; of this one nothing is left to continue"
    said = io.StringIO()
    show_status(collect_status(file), Console(file=said, width=200))
    assert said.getvalue().count("(deleted)") == said.getvalue().count(deleted) == 1
    assert f"    it broke\n    {advice}\n" in said.getvalue() and "same command" not in said.getvalue()
    (entry,) = [each for each in collect_log(file)["attempts"] if each["run"] == "r02"]
    assert entry["model_deleted"] and entry["why"] == ["it broke", advice]
    # Once the alias has moved on, its run goes as well, and what it registered.
    tracked.client.set_registered_model_alias("m", "champion", "3")
    assert cleaned(file, 1, None)[0]["freed_mlflow_bytes"] == 8000 and tracked.versions() == {"3"}


def test_what_a_killed_cleaning_left_in_mlflow_goes_and_a_store_of_other_people_is_left_alone(
    file: Path, tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    def dies(folder: Path) -> None:
        folders.append(folder)
        if len(folders) == 2:
            raise KeyboardInterrupt
        shutil.rmtree(folder)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("penstock.training.tracking.mlflow_files.shutil", SimpleNamespace(rmtree=dies))
        cleaned(file, 1, None)
    left = cleaned(file, 1, None)[0]["freed_mlflow_bytes"]
    assert left == 8000 + 3000 and tracked.size_bytes() == 8000 and tracked.versions() == {"3"}

    elsewhere = file.parent / "elsewhere"
    shutil.move(tracked.folder, elsewhere)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{elsewhere}/mlflow.db")
    nights(Storage(str(file.parent / "state")), file.parent, 4)
    before = Storage(str(elsewhere)).tree()
    assert cleaned(file, 1, None)[0]["freed_mlflow_bytes"] == 0 and Storage(str(elsewhere)).tree().keys() == before.keys()


def test_nights_with_retention_take_the_room_of_those_that_are_kept_in_mlflow_too(file: Path, tracked: Tracked) -> None:
    rooms = []
    for number in range(4, 13):
        night(tracked.ledger, file.parent, number, window=3)
        tracked.night(number)
        cleaned(file, 3, None)
        rooms.append(tracked.size_bytes())
    assert rooms == [3 * 8000] * len(rooms) and len(tracked.versions()) == 3
    file.write_text(PIPELINE + "retention: {keep_runs: 1, mlflow: false}\n")
    assert cleaned(file)[0]["freed_mlflow_bytes"] == 0 and tracked.size_bytes() == 3 * 8000


@flow
def attempt() -> None:
    """Of the pipeline."""


@pytest.mark.drill  # it starts the project's Prefect server
def test_flow_runs_of_cleaned_runs_go_from_the_projects_own_server(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = file.parent / ".penstock"
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with prefect_api(state), get_client(sync_client=True) as client:
        made = {name: client.create_flow_run(attempt, tags=["p", name]).id for name in ("r01", "r02", "r03")}
    assert cleaned(file, 1, None, dry_run=True)[0]["freed_flow_runs"] == 0
    result, said = cleaned(file, 1, None)
    assert result["freed_flow_runs"] == 2 and "freed 2 flow runs of Prefect's" in said
    with prefect_api(state), get_client(sync_client=True) as client:
        assert [each.id for each in client.read_flow_runs()] == [made["r03"]]


@pytest.mark.drill  # the registry is asked for ten seconds
def test_where_nobody_knows_which_models_have_an_alias_nothing_goes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = Storage(str(file.parent / "state"))
    run = Ledger(state).load_run("r01")
    assert run is not None
    Ledger(state).save_run(run.model_copy(update={"result": {"model_uri": "models:/m/1"}}))
    before = state.tree()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(ServiceError, match="cannot look up the aliases of 'm'"):
        cleaned(file, 1, None)
    assert state.tree() == before
