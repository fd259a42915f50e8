"""The command on a real project, as a user runs it: real Prefect server, real Ray workers, real MLflow store."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import mlflow.pyfunc
import psutil
import pytest
from mlflow.tracking import MlflowClient

from benchmarks.outcome import learning_times
from penstock.storage import Storage
from tests.drills.project import Command, make_project
from tests.runs import forked
from tests.runs.faulty_front import faulty_front
from tests.servers.swift import SwiftServer
from tests.shared import CALM_EPOCHS

pytestmark = pytest.mark.slow


def penstock(*words: str, code: int = 0, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    return forked.Command(*words, "--json", environment=environment).finish(code)


def tracking(file: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{file.parent}/.penstock/mlflow/mlflow.db")


def test_the_result_holds_what_the_contract_names(calm: dict[str, Any]) -> None:
    assert calm["status"] == "done"
    assert calm["attempt"] == 1
    assert calm["exactness"] == "bit-exact"
    names = ["read", "preprocess", "materialize", "shuffle", "train", "evaluate", "register"]
    assert [(s["name"], s["outcome"]) for s in calm["stages"]] == [(name, "ran") for name in names]
    assert {"run", "mlflow_run_id", "metrics", "checkpoint", "model_uri", "weights_digest"} <= calm.keys()
    assert calm["metrics"]["val/accuracy"] > 0.5


def test_one_mlflow_run_tells_the_whole_story(calm_file: Path, calm: dict[str, Any]) -> None:
    client = tracking(calm_file)
    run = client.get_run(calm["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["train.batch_rows"] == "64"
    assert "null" not in run.data.params.values()
    assert calm["run"] == f"drill-{run.info.run_name}" and calm["url"] is None
    result, model, data, page = run.data.tags["mlflow.note.content"].split("\n\n")
    state = calm_file.parent / ".penstock"
    (attempt,) = state.glob("runs/*/attempts/*.json")
    flow_run, prefect = json.loads(attempt.read_text())["prefect_flow_run_id"], (state / "prefect" / "port").read_text()
    there = f"http://127.0.0.1:{prefect}/runs/flow-run/{flow_run}"
    assert page == f"[Attempt 1 in Prefect]({there})"
    with contextlib.closing(sqlite3.connect(state / "prefect" / "prefect.db")) as database:
        described = database.execute("SELECT description FROM artifact WHERE key = 'drill-train'").fetchall()
    assert f"tracked as `{run.info.run_id}`" in described[0][0]
    assert data.startswith("Data: ") and "rows train 1" in data and "validation" in data
    assert model.startswith("Model: model.py:Net, of step 115") and result.startswith("Result: val/accuracy ")
    assert run.data.tags["penstock.exactness"] == "bit-exact"
    for name in ("train/loss", "train/lr", "train/rows_per_s", "train/step_s", "train/data_wait_s", "val/loss"):
        steps = [point.step for point in client.get_metric_history(run.info.run_id, name)]
        assert steps, name
        assert len(steps) == len(set(steps)), f"{name} holds a step twice"
    artifacts = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert {"attempt-1", "evaluation", "data", "keys.json", "checkpoints.json"} <= artifacts
    assert {given.tags[0].value for given in run.inputs.dataset_inputs} == {"train", "validation"}
    of_run = f"source_run_id = '{run.info.run_id}'"
    (model_of_run,) = client.search_logged_models([run.info.experiment_id], filter_string=of_run)
    assert model_of_run.name == "drill", "a checkpoint is not a model"


def test_the_registered_model_loads_by_its_alias_and_predicts(
    calm_file: Path, calm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = tracking(calm_file).get_model_version_by_alias("drill", "candidate")
    assert calm["model_uri"] == f"models:/drill/{version.version}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{calm_file.parent}/.penstock/mlflow/mlflow.db")
    model = mlflow.pyfunc.load_model("models:/drill@candidate")  # in a process without penstock: tests/training/registry
    assert len(model.predict(model.input_example)) > 0
    (spec,) = calm_file.parent.glob(".penstock/mlflow/**/model.json")
    assert set(json.loads(spec.read_text())["code"]["files"]) == {"model.py", "smoothing.txt", "width.txt"}


@pytest.mark.usefixtures("shared_prefect")
def test_the_same_command_again_reuses_every_stage(calm_file: Path, calm: dict[str, Any]) -> None:
    planned = penstock("plan", str(calm_file))
    assert [stage["action"] for stage in planned["stages"]] == ["reuse"] * 7
    # What SIGKILL leaves in the last seconds: the run is recorded as done, its attempt is not yet.
    record = next(calm_file.parent.glob(".penstock/runs/*/attempts/0001.json"))
    record.write_text(json.dumps({**json.loads(record.read_text()), "status": "running", "ended": None}))
    again = penstock("run", str(calm_file))
    assert json.loads(record.read_text())["status"] == "done"
    assert {s["outcome"] for s in again["stages"]} == {"reused"}
    for name in ("run", "mlflow_run_id", "model_uri", "weights_digest", "checkpoint"):
        assert again[name] == calm[name]


@pytest.mark.usefixtures("shared_prefect")
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.drill)])
def test_reused_run_makes_at_most_34_requests_to_a_store(
    calm: dict[str, Any], calm_file: Path, s3_server: SwiftServer, s3_bucket: str, tmp_path: Path, times: int
) -> None:
    """20 and two for each stage; one more fails the second run. Heartbeats (list, get, put) depend on time and do not count."""
    project, records = tmp_path / "project", Storage(f"{s3_bucket}/state")
    shutil.copytree(calm_file.parent, project)
    for folder in ("datasets", "pipelines", "profiles", "runs", "stages", "units"):
        for file in (project / ".penstock" / folder).rglob("*.*"):
            if not {"lease", "leases"} & {*file.parts}:  # a disk keeps more of them
                records.put_file(file, file.relative_to(project / ".penstock").as_posix())
    asked, environment = list[str](), f"runs/{calm['run']}/environment.txt"
    with faulty_front(urlsplit(s3_server.endpoint).port or 0, lambda request: asked.append(unquote(request))) as port:
        for _ in range(times):
            asked.clear()
            records.write_bytes(environment, b"of the attempt that trained")
            front = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
            again = penstock("run", str(project / calm_file.name), "--set", f"storage={records.root}", environment=front)
    assert {s["outcome"] for s in again["stages"]} == {"reused"}
    assert records.read_bytes(environment) == b"of the attempt that trained"
    beats = 0
    for path, begin, end in (("lease", "LPG" if times == 1 else "LGPG", "GP"), (f"leases/{calm['run']}", "PG", "GD")):
        of_lease = [each for each in asked if f"/pipelines/drill/{path}/" in each]
        letters = "".join("L" if "list-type" in each else each[0] for each in of_lease)
        found = re.fullmatch(f"{begin}((?:LGP)*){end}", letters)
        assert found is not None, "\n".join(of_lease)
        beats += len(found[1])
    assert len(asked) - beats <= 20 + 2 * len(again["stages"]), "\n".join(asked)


def test_status_lists_the_run(calm_file: Path, calm: dict[str, Any]) -> None:
    result = penstock("status", str(calm_file))
    assert [(run["run"], run["status"]) for run in result["runs"]] == [(calm["run"], "done")]


def test_the_benchmarks_find_when_each_step_ended(calm_file: Path, calm: dict[str, Any]) -> None:
    ends = learning_times(calm_file.parent, calm)
    assert [*ends] == [*range(1, len(ends) + 1)] and len(ends) >= CALM_EPOCHS
    assert sorted(ends.values()) == [*ends.values()] and ends[1] < time.time()


PAUSED = ("--set", "train.params={pause_s: 0.05}")


def checkpoint_in(file: Path) -> Callable[[], bool]:
    return lambda: any((file.parent / ".penstock").glob("runs/*/checkpoints/*/manifest.json"))


@pytest.mark.drill
def test_a_run_inside_a_running_event_loop_gives_its_result_and_raises_its_own_errors(tmp_path: Path) -> None:
    file = make_project(tmp_path, files=2)
    part = file.parent / "data" / "train" / "part-0.parquet"
    script = (
        "import asyncio, pandas, sys, penstock\n"
        "async def main():\n"
        "    print(penstock.run(sys.argv[1], until='read')['status'])\n"
        "    try: penstock.run(sys.argv[1], until='raed')\n"
        "    except penstock.errors.SpecError as error: print(error.message)\n"
        "    try: penstock.run(sys.argv[1], ['data.train=gone/'], until='read')\n"
        "    except penstock.errors.DataError as error: print(type(error).__name__)\n"
        "    frame = pandas.read_parquet(sys.argv[2]).head(100)\n"
        "    print(penstock.run(sys.argv[1], until='read', data={'train': frame})['stages'][0]['outcome'])\n"
        "    print(penstock.run(sys.argv[1], until='read', data={'train': frame})['stages'][0]['outcome'])\n"
        "asyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", script, str(file), str(part)], capture_output=True, text=True, timeout=300)
    refused = ["until='raed' is not a stage; did you mean 'read'?", "DataError"]
    assert done.stdout.splitlines() == ["partial", *refused, "ran", "reused"], done.stderr
    assert "never awaited" not in done.stderr


@pytest.mark.drill
@pytest.mark.usefixtures("shared_prefect")
def test_a_second_signal_does_not_wait_for_the_step(tmp_path: Path) -> None:
    file = make_project(tmp_path / "impatient", epochs=1, files=1, workers=2)
    # A step that does not end by itself; the batch that is tried before training is quick.
    with (file.parent / "model.py").open("a") as model:
        model.write("\n    def loss(self, model, batch):\n")
        model.write("        time.sleep(3600 * torch.distributed.is_initialized())\n        return model[0].weight.sum()\n")
    command = forked.Command("run", str(file), "--json")
    attempts = lambda: (file.parent / ".penstock").glob("runs/*/attempts/*.json")  # noqa: E731
    command.wait_for("training", lambda: any(len(json.loads(path.read_text())["workers"]) == 2 for path in attempts()))
    workers = [int(place.rsplit(":", 1)[1]) for place in json.loads(next(attempts()).read_text())["workers"].values()]
    for number in (signal.SIGINT, signal.SIGTERM):  # two of one kind may arrive as one
        command.process.send_signal(number)
    stopped = command.finish(code=130)
    assert stopped["status"] == "interrupted"
    assert stopped["checkpoint"] is None
    assert "did not stop within" not in command.said
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)], timeout=240)
    assert not alive


@pytest.mark.drill
@pytest.mark.parametrize(("server", "times"), [("prefect_server", 1), ("gcs_server", 2)])
def test_signals_while_a_server_starts_end_the_command(tmp_path: Path, server: str, times: int) -> None:
    file = make_project(tmp_path / "early", epochs=1, files=1)
    command = Command("run", str(file), "--json")
    children: dict[int, psutil.Process] = {}

    def starts() -> bool:
        children.update({child.pid: child for child in psutil.Process(command.process.pid).children(recursive=True)})
        return any(server in " ".join(child.cmdline()) for child in children.values() if child.is_running())

    command.wait_for(f"the start of {server}", starts)
    for _ in range(times):
        command.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)  # the server is starting all the while; two of one kind may arrive as one
    # A shell says 143 of both: the command's own exit code, or a signal that came when all was said and Python was ending.
    out, _ = command.process.communicate(timeout=300)
    assert command.process.returncode in (143, -signal.SIGTERM)[:times], command.said
    stopped = json.loads(out.splitlines()[-1])
    assert stopped["status"] == "interrupted" and stopped["error"]["next"] == f"penstock run {file}"
    assert not psutil.wait_procs(children.values(), timeout=240)[1]
    assert (file.parent / ".penstock" / "runs").exists() == (server == "gcs_server")  # Ray starts within the flow


@pytest.mark.usefixtures("shared_prefect")
@pytest.mark.drill
def test_what_an_unfinished_run_refuses_and_what_runs_beside_it(tmp_path: Path) -> None:
    file = make_project(tmp_path / "twice", epochs=2000, files=2)
    command = forked.Command("run", str(file), "--json", *PAUSED)
    command.wait_for("a checkpoint", checkpoint_in(file))
    refused = penstock("run", str(file), *PAUSED, code=6)
    assert refused["error"]["kind"] == "LeaseHeldError"
    assert f"pid {command.process.pid} on" in refused["error"]["message"]
    killed = json.loads(next((file.parent / ".penstock").glob("runs/*/run.json")).read_text())
    # Another training of the same rows is done beside it, in a run of its own, and changes nothing of it.
    other = penstock("run", str(file), "--set", "train.epochs=1")
    assert other["run"] != killed["run"] and other["status"] == "done" and other["model_uri"] == "models:/drill/1"
    assert [stage["outcome"] for stage in other["stages"]][:5] == [*["reused"] * 4, "ran"]
    assert command.process.poll() is None
    command.kill()
    # The command that was killed goes back to its run, though another is the newest by now.
    command = forked.Command("run", str(file), "--json", *PAUSED)
    command.wait_for("the attempt", lambda: f"run {killed['run']}, attempt 2" in command.said)
    command.kill()
    refused = penstock("run", str(file), *PAUSED, "--set", "train.batch_rows=32", code=6)
    assert refused["error"]["problems"] == ["shuffle.lanes of batch_rows: 64 -> 32", "train.batch_rows: 64 -> 32"]
    command_line = f"penstock run {file} --set '{PAUSED[1]}' --set train.batch_rows=32 --fresh"
    assert refused["error"]["next"].endswith(command_line)
    begun = penstock("run", str(file), *PAUSED, "--set", "train.batch_rows=32", "--fresh", "--until", "read")
    assert begun["run"] != killed["run"]
    # The run that is left behind is not left running.
    left = tracking(file).get_run(killed["tracking_runs"]["mlflow"])
    assert (left.info.status, left.data.tags["penstock.status"]) == ("KILLED", "killed")
    assert {run["run"]: run["status"] for run in penstock("status", str(file))["runs"]} == {
        killed["run"]: "killed",
        other["run"]: "done",
        begun["run"]: "partial",
    }


def test_a_wrong_spec_lists_every_problem_and_exits_with_2(calm_file: Path) -> None:
    answer = penstock("run", str(calm_file), "--set", "train.batch_rows=0", "--set", "train.epoch=3", code=2)
    assert answer["error"]["kind"] == "SpecError"
    assert len(answer["error"]["problems"]) == 2
    assert "did you mean 'epochs'?" in " ".join(answer["error"]["problems"])


def test_check_failure_is_refused_before_servers(tmp_path: Path) -> None:
    file = make_project(tmp_path / "overlap", files=2)
    both = ("--set", "data.test=data/train/part-1.parquet")
    checked = penstock("check", str(file), *both, code=4)
    refused = penstock("run", str(file), *both, code=4)
    assert refused["error"] == checked["error"] and "part-1.parquet" in str(refused["error"])
    model = penstock("run", str(file), "--set", "train.recipe=model.py:Nett", code=2)
    assert "did you mean 'Net'?" in model["error"]["message"]
    assert not (file.parent / ".penstock" / "prefect").exists()


@pytest.mark.usefixtures("shared_prefect")
def test_a_broken_source_file_exits_with_4_and_is_named(tmp_path: Path) -> None:
    file = make_project(tmp_path / "broken", files=3)
    part = file.parent / "data" / "train" / "part-1.parquet"
    part.write_bytes(part.read_bytes()[:-200])
    answer = penstock("run", str(file), code=4)
    assert "part-1.parquet" in json.dumps(answer["error"])


@contextlib.contextmanager
def refusing_server() -> Iterator[str]:
    """Address of an HTTP server that is up and refuses everything, as one whose password has changed."""

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 403)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.drill
@pytest.mark.usefixtures("shared_prefect")
def test_an_attempt_that_cannot_open_its_records_is_on_record_as_failed(tmp_path: Path) -> None:
    file = make_project(tmp_path / "closed", files=1)
    with refusing_server() as server:
        away = f"http://somebody:hunter2@{server}"
        refused = penstock("run", str(file), code=3, environment={"MLFLOW_TRACKING_URI": away})
    assert refused["error"]["kind"] == "ServiceError"
    assert "***@127.0.0.1" in refused["error"]["message"]
    assert "hunter2" not in json.dumps(refused)
    (run,) = penstock("status", str(file))["runs"]
    assert run["status"] == "failed"
    assert [attempt["status"] for attempt in run["attempts"]] == ["failed"]
    assert refused["error"]["message"] in run["attempts"][0]["error"] and "Next: " in run["attempts"][0]["error"]


@pytest.mark.drill
@pytest.mark.usefixtures("shared_prefect")
def test_a_project_that_was_copied_or_moved_reads_its_own_files(tmp_path: Path) -> None:
    first, copied = make_project(tmp_path / "first", files=1), tmp_path / "copied" / "pipeline.yaml"
    penstock("run", str(first), "--until", "materialize")
    shutil.copytree(first.parent, copied.parent)
    for shard in (copied.parent / ".penstock" / "units").rglob("*.arrow"):
        shard.unlink()
    (first.parent / "data").rename(tmp_path / "away")
    again = penstock("run", str(copied), "--until", "materialize")
    assert {stage["name"]: stage["outcome"] for stage in again["stages"]} == {
        "read": "reused",
        "preprocess": "reused",
        "materialize": "ran",
    }


@pytest.mark.drill
def test_training_that_fails_after_a_checkpoint_says_how_exact_that_is(tmp_path: Path, prefect_url: str) -> None:
    file = make_project(tmp_path / "project", files=2)
    model = file.parent / "model.py"
    counted = (
        "        self.steps = getattr(self, 'steps', 0) + 1\n        assert self.steps < 40, 'enough of it'\n        time.sleep"
    )
    model.write_text(model.read_text().replace("        time.sleep", counted))
    slow = {"PREFECT_API_URL": prefect_url, "DRILL_PAUSE_S": "0.05"}  # a checkpoint of every fifth step has time to be written
    failed = forked.Command("run", str(file), "--json", environment=slow).finish(code=5)
    assert "enough of it" in str(failed["error"]) and failed["checkpoint"].startswith("step-00000000")
    assert failed["exactness"] == "bit-exact"
