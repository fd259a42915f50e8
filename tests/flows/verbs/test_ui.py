"""Does `penstock ui` open both pages on the state of a folder, and leave no process behind? With the real servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow.tracking import MlflowClient

from penstock.training.tracking.mlflow_store import mlflow_uri
from tests.runs.forked import Command
from tests.runs.servers import ROOT, eventually, free_port

pytestmark = pytest.mark.slow


class Ui:
    """One `penstock ui` process, started in `folder`, and the addresses that it printed."""

    def __init__(self, folder: Path, **environment: str) -> None:
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # A test run in the background of a shell ignores SIGINT, and its children would too.
        restore = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
            "from penstock.flows.cli import main; main()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", restore, "ui", "--json"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pages: dict[str, str] = {}
        assert self.process.stderr is not None
        for line in self.process.stderr:
            name, _, url = line.strip().partition(": ")
            self.pages[name] = url.strip()
            if line.startswith("Ctrl-C"):
                break  # without it the command ends by itself
        self.family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []

    def end(self, signum: int) -> dict[str, Any]:
        self.process.send_signal(signum)
        out, err = self.process.communicate(timeout=300)
        assert self.process.returncode == 0, err
        return json.loads(out.strip().splitlines()[-1])  # type: ignore[no-any-return]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the state of one run: a metric and an artifact."""
    client = MlflowClient(mlflow_uri(tmp_path / ".penstock"))
    run = client.create_run(client.create_experiment("tiny", (tmp_path / ".penstock" / "mlflow" / "artifacts").as_uri()))
    client.log_metric(run.info.run_id, "loss", 0.5)
    client.log_text(run.info.run_id, "hello", "note.txt")
    return tmp_path


@pytest.fixture
def started(folder: Path) -> Iterator[Ui]:
    ui = Ui(folder)
    yield ui
    for process in ui.family:
        if process.is_running():
            process.kill()
    ui.process.kill()
    ui.process.wait()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as reply:
        assert reply.status == 200
        return str(reply.read().decode())


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.loads(reply.read())  # type: ignore[no-any-return]


def listening_hosts(processes: list[psutil.Process]) -> set[str]:
    found = (connection for process in processes for connection in process.net_connections())
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


def test_ui_serves_both_pages_until_ctrl_c(started: Ui, folder: Path) -> None:
    page, prefect = started.pages["MLflow"], started.pages["Prefect"]
    mlflow, _, place = page.partition("/#")
    assert place == "/experiments/1/runs?workflowType=machine_learning"
    assert "<html" in get(mlflow).lower()
    assert "<html" in get(prefect).lower()
    runs = post(f"{mlflow}/api/2.0/mlflow/runs/search", {"experiment_ids": ["1"]})["runs"]
    assert [(m["key"], m["value"]) for m in runs[0]["data"]["metrics"]] == [("loss", 0.5)]
    assert get(f"{mlflow}/get-artifact?path=note.txt&run_id={runs[0]['info']['run_id']}") == "hello"
    assert listening_hosts(started.family) == {"127.0.0.1"}
    assert started.end(signal.SIGINT) == {"status": "done", "mlflow": page, "prefect": prefect}
    # The Prefect server stays some seconds for the next command.
    _, alive = psutil.wait_procs(started.family, timeout=240)
    assert not alive, f"left behind: {alive}"


def test_ui_prints_configured_servers_and_starts_none(folder: Path) -> None:
    # Stands for both servers: `ui` asks for their health, and for the experiments.
    port = free_port()
    stub = f"""
import http.server
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"true")
    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{{"experiments": [{{"name": "tiny", "experiment_id": "7"}}]}}')
http.server.HTTPServer(("127.0.0.1", {port}), Healthy).serve_forever()
"""
    with subprocess.Popen([sys.executable, "-c", stub], stderr=subprocess.DEVNULL) as server:
        try:
            wait_for_port(port)
            api = f"http://127.0.0.1:{port}/api"
            ui = Ui(folder, PREFECT_API_URL=api, MLFLOW_TRACKING_URI=f"http://127.0.0.1:{port}")
            assert ui.pages["MLflow"] == f"http://127.0.0.1:{port}/#/experiments/7/runs?workflowType=machine_learning"
            assert ui.pages["Prefect"] == f"http://127.0.0.1:{port}"
            assert ui.process.wait(60) == 0, "there is nothing to close"
        finally:
            server.kill()


def wait_for_port(port: int) -> None:
    def answers() -> bool:
        try:
            return bool(get(f"http://127.0.0.1:{port}/"))
        except OSError:
            return False

    eventually(answers, 30, "the stand-in server", every_s=0.1)


@pytest.mark.drill
@pytest.mark.usefixtures("shared_prefect")
def test_page_that_does_not_start_is_refused_with_its_log(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    environment = {"MLFLOW_TRACKING_URI": "sqlite:////proc/nothing/mlflow.db"}
    error = Command("ui", "--json", environment=environment).finish(3)["error"]
    assert "the MLflow server for http://127.0.0.1" in error["message"] and "server.log" in error["next"]
