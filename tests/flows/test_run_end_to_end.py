"""The command on a real project, as a user runs it: real Prefect server, real Ray workers, real MLflow store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import mlflow
import pytest
from mlflow.tracking import MlflowClient

from flows.services import prefect_api
from tests.drills.project import Command, make_project

pytestmark = pytest.mark.slow


def penstock(*words: str, code: int = 0) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "flows", *words, "--json"], capture_output=True, text=True, timeout=400)
    assert done.returncode == code, f"exit code {done.returncode}:\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"), epochs=3, files=2)


@pytest.fixture(scope="module")
def first(project: Path) -> dict[str, Any]:
    planned = penstock("plan", str(project))
    assert [stage["action"] for stage in planned["stages"]] == ["run"] * 7
    return penstock("run", str(project))


def tracking(project: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{project.parent}/.penstock/mlflow/mlflow.db")


def test_the_result_holds_what_the_contract_names(first: dict[str, Any]) -> None:
    assert first["status"] == "done"
    assert first["attempt"] == 1
    assert first["exactness"] == "bit-exact"
    names = ["read", "preprocess", "materialize", "shuffle", "train", "evaluate", "register"]
    assert [(s["name"], s["outcome"]) for s in first["stages"]] == [(name, "ran") for name in names]
    assert {"run", "mlflow_run_id", "metrics", "checkpoint", "model_uri", "weights_digest"} <= first.keys()
    assert first["metrics"]["validation/accuracy"] > 0.5


def test_one_mlflow_run_tells_the_whole_story(project: Path, first: dict[str, Any]) -> None:
    client = tracking(project)
    run = client.get_run(first["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["train.batch_rows"] == "64"
    assert run.data.tags["penstock.exactness"] == "bit-exact"
    assert run.data.tags["penstock.key.materialize"]
    for name in ("train/loss", "train/lr", "train/rows_per_s", "train/step_s", "train/data_wait_s", "val/loss"):
        steps = [point.step for point in client.get_metric_history(run.info.run_id, name)]
        assert steps, name
        assert len(steps) == len(set(steps)), f"{name} holds a step twice"
    artifacts = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert {"attempt-1", "evaluation"} <= artifacts


def test_the_registered_model_loads_by_its_alias_and_predicts(project: Path, first: dict[str, Any]) -> None:
    client = tracking(project)
    version = client.get_model_version_by_alias("drill", "candidate")
    assert first["model_uri"] == f"models:/drill/{version.version}"
    mlflow.set_tracking_uri(f"sqlite:///{project.parent}/.penstock/mlflow/mlflow.db")
    model = mlflow.pyfunc.load_model("models:/drill@candidate")
    assert len(model.predict(model.input_example)) > 0


def test_the_same_command_again_reuses_every_stage(project: Path, first: dict[str, Any]) -> None:
    planned = penstock("plan", str(project))
    assert [stage["action"] for stage in planned["stages"]] == ["reuse"] * 7
    again = penstock("run", str(project))
    assert {s["outcome"] for s in again["stages"]} == {"reused"}
    for name in ("run", "mlflow_run_id", "model_uri", "weights_digest", "checkpoint"):
        assert again[name] == first[name]


def test_status_lists_the_run(project: Path, first: dict[str, Any]) -> None:
    result = penstock("status", str(project))
    assert [(run["run"], run["status"]) for run in result["runs"]] == [(first["run"], "done")]


def test_sigterm_saves_and_the_next_run_continues_to_the_same_weights(tmp_path: Path) -> None:
    paused = ["--set", "train.params={pause_s: 0.05}"]
    calm = Command("run", str(make_project(tmp_path / "calm", epochs=4, files=2)), "--json", *paused).finish()
    file = make_project(tmp_path / "stopped", epochs=4, files=2)
    command = Command("run", str(file), "--json", *paused)
    assert command.process.stderr is not None
    storage = file.parent / ".penstock"
    while not list(storage.glob("runs/*/checkpoints/*/manifest.json")):
        assert command.process.poll() is None
        command.process.stderr.readline()
    os.kill(command.process.pid, signal.SIGTERM)
    out, err = command.process.communicate(timeout=120)
    assert command.process.returncode == 143, err[-3000:]
    stopped = json.loads(out.strip().splitlines()[-1])
    assert stopped["status"] == "interrupted"
    assert f"continue with: penstock run {file}" in err
    assert tracking(file).get_run(stopped["mlflow_run_id"]).info.status == "KILLED"
    finished = Command("run", str(file), "--json", *paused).finish()
    assert finished["mlflow_run_id"] == stopped["mlflow_run_id"]
    assert finished["weights_digest"] == calm["weights_digest"]
    assert tracking(file).get_run(stopped["mlflow_run_id"]).info.status == "FINISHED"


def test_cancel_in_prefect_stops_a_run_from_a_terminal_and_saves(tmp_path: Path) -> None:
    file = make_project(tmp_path / "cancelled", epochs=60, files=2)
    state = file.parent / ".penstock"
    command = Command("run", str(file), "--json", "--set", "train.params={pause_s: 0.05}")
    assert command.process.stderr is not None
    while not list(state.glob("runs/*/checkpoints/*/manifest.json")):
        assert command.process.poll() is None
        command.process.stderr.readline()
    attempt = json.loads(next(state.glob("runs/*/attempts/*.json")).read_text())
    with prefect_api(state) as server:
        url = f"{server.api_url}/flow_runs/{attempt['prefect_flow_run_id']}"
        httpx.post(f"{url}/set_state", json={"state": {"type": "CANCELLING"}}).raise_for_status()
        out, err = command.process.communicate(timeout=120)
        assert command.process.returncode == 143, err[-3000:]
        assert httpx.get(url).json()["state"]["type"] == "CANCELLED"
    stopped = json.loads(out.strip().splitlines()[-1])
    assert stopped["status"] == "interrupted"
    assert tracking(file).get_run(stopped["mlflow_run_id"]).info.status == "KILLED"


def test_a_second_process_on_the_same_pipeline_is_refused(tmp_path: Path) -> None:
    file = make_project(tmp_path / "twice", epochs=60, files=2)
    command = Command("run", str(file), "--json", "--set", "train.params={pause_s: 0.05}")
    try:
        while not list((file.parent / ".penstock").glob("runs/*/run.json")):
            assert command.process.poll() is None
            assert command.process.stderr is not None
            command.process.stderr.readline()
        refused = penstock("run", str(file), code=6)
        assert refused["error"]["kind"] == "LeaseHeldError"
        assert f"pid {command.process.pid} on" in refused["error"]["message"]
    finally:
        command.kill()
    # What the kill left is repaired by the first command that looks.
    repaired = penstock("status", str(file))
    assert [run["status"] for run in repaired["runs"]] == ["killed"]
    assert tracking(file).get_run(repaired["runs"][0]["mlflow_run_id"]).info.status == "KILLED"


def test_a_wrong_spec_lists_every_problem_and_exits_with_2(project: Path) -> None:
    answer = penstock("run", str(project), "--set", "train.batch_rows=0", "--set", "train.epoch=3", code=2)
    assert answer["error"]["kind"] == "SpecError"
    assert len(answer["error"]["problems"]) == 2
    assert "did you mean 'epochs'?" in " ".join(answer["error"]["problems"])


def test_a_broken_source_file_exits_with_4_and_is_named(tmp_path: Path) -> None:
    file = make_project(tmp_path / "broken", files=3)
    part = file.parent / "data" / "train" / "part-1.parquet"
    part.write_bytes(part.read_bytes()[:-200])
    answer = penstock("run", str(file), code=4)
    assert "part-1.parquet" in json.dumps(answer["error"])


def test_a_forbidden_change_on_an_unfinished_run_exits_with_6(tmp_path: Path) -> None:
    file = make_project(tmp_path / "changed", epochs=60, files=2)
    paused = ("--set", "train.params={pause_s: 0.05}")
    command = Command("run", str(file), "--json", *paused)
    assert command.process.stderr is not None
    while not list((file.parent / ".penstock").glob("runs/*/checkpoints/*/manifest.json")):
        assert command.process.poll() is None
        command.process.stderr.readline()
    command.kill()
    refused = penstock("run", str(file), *paused, "--set", "train.batch_rows=32", code=6)
    assert refused["error"]["problems"] == ["train.batch_rows: 64 -> 32"]
    assert "--fresh" in refused["error"]["next"]
