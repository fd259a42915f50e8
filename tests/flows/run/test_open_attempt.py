"""A new attempt sends what an earlier one left unsent, and does not read again what the tracked run has."""

from __future__ import annotations

import json
from pathlib import Path

import mlflow.artifacts
import pytest
from mlflow.tracking import MlflowClient

from penstock.storage import Storage
from tests.drills.project import make_project
from tests.drills.without_servers import leave_out_servers, run_here

pytestmark = pytest.mark.slow


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    leave_out_servers(monkeypatch)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    return make_project(tmp_path / "p", epochs=1, files=1)


def profile_of(run_id: str) -> object:
    return mlflow.artifacts.load_dict(f"runs:/{run_id}/data/profile.json")


def test_outbox_of_attempt_without_end_is_sent(file: Path) -> None:
    first = run_here(file)
    storage, run_id = Storage(str(file.parent / ".penstock")), first["mlflow_run_id"]
    folder = f"runs/{first['run']}"
    closed = storage.read_json(f"{folder}/attempts/0001.json")
    assert (closed["status"], closed["sent_to"]) == ("done", run_id)
    killed = json.dumps({**closed, "status": "running", "ended": None, "sent_to": None})
    for number, left in enumerate((killed, "{"), 1):  # the newest record may be torn
        storage.write_bytes(f"{folder}/attempts/{number:04d}.json", left.encode())
        tags = {"kind": "tags", "args": {"tags": {f"left.{number}": "unsent"}}}
        storage.write_json(f"{folder}/outbox.json", {"operations": [tags]})
        assert run_here(file)["mlflow_run_id"] == run_id
        assert MlflowClient().get_run(run_id).data.tags[f"left.{number}"] == "unsent"
        assert not storage.exists(f"{folder}/outbox.json")


def test_profile_is_read_for_a_tracked_run_without_it(file: Path) -> None:
    first = run_here(file)["mlflow_run_id"]
    storage, shown = Storage(str(file.parent / ".penstock")), profile_of(first)
    (profile,) = storage.tree("profiles")
    kept = storage.read_bytes(profile)
    storage.delete(profile)
    again = run_here(file)
    assert (again["mlflow_run_id"], profile_of(first)) == (first, shown), "it is not read again"
    assert {stage["outcome"] for stage in again["stages"]} == {"reused"}
    storage.write_bytes(profile, kept)
    MlflowClient().delete_run(first)
    second = run_here(file)["mlflow_run_id"]
    assert second != first and profile_of(second) == shown
    assert len(MlflowClient().get_run(second).inputs.dataset_inputs) == 2
