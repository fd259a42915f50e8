"""A Prefect server that dies, or answers some requests only, costs a page and not the run: same exit code, same weights."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.errors import ServiceError
from penstock.flows.servers.prefect_server import LINGER_ENV, ServerFiles, ServerInfo
from tests import ROOT
from tests.runs.faulty_front import Fault, faulty_front
from tests.runs.forked import Command
from tests.runs.servers import eventually
from tests.shared import make_lone

pytestmark = pytest.mark.drill

SLOW = {"DRILL_PAUSE_S": "0.05"}


def run_of(file: Path, **environment: str) -> Command:
    command = Command("run", str(file), "--json", environment={**SLOW, **environment})
    command.wait_for("a checkpoint", lambda: any(file.parent.glob(".penstock/runs/*/checkpoints/*/manifest.json")))
    return command


def info(state: Path) -> ServerInfo:
    files = ServerFiles(state)
    files.prepare()
    return eventually(lambda: None if files.is_free("server") else files.read_info(), 300, "the server")


@contextmanager
def server_of_the_user(state: Path) -> Iterator[ServerInfo]:
    """A server that is not the command's to start again. A second one of the same folder has the same port and records."""
    words = [sys.executable, "-m", "penstock.flows.servers.prefect_server", str(state)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    process = subprocess.Popen(words, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT), LINGER_ENV: "600"})
    try:
        yield info(state)
    finally:
        process.kill()
        process.wait()


def test_the_embedded_server_is_started_again_and_has_the_whole_run(tmp_path: Path, lone: dict[str, Any]) -> None:
    file = make_lone(tmp_path / "p")
    command = run_of(file)
    state = file.parent / ".penstock"
    first = info(state)
    os.kill(first.pid, signal.SIGKILL)
    result = command.finish()
    assert result["weights_digest"] == lone["weights_digest"]
    assert "Traceback" not in command.said and "Error logging" not in command.said and "warning" not in command.said
    with sqlite3.connect(state / "prefect" / "prefect.db") as database:
        assert database.execute("select state_type from flow_run").fetchall() == [("COMPLETED",)]


def test_a_server_that_does_not_come_back_is_told_later(tmp_path: Path, lone: dict[str, Any]) -> None:
    file = make_lone(tmp_path / "p")
    with server_of_the_user(tmp_path / "server") as server:
        command = run_of(file, PREFECT_API_URL=server.url)
    result = command.finish()
    assert result["weights_digest"] == lone["weights_digest"] and result["metrics"] == lone["metrics"]
    assert "Traceback" not in command.said and "Error logging" not in command.said
    assert command.said.count("Prefect server is away and lacks the end of this attempt") == 1

    away = Command("status", str(file), "--json", environment={"PREFECT_API_URL": server.url})
    assert away.finish()["runs"][0]["status"] == "done" and "not repaired" in away.said
    with server_of_the_user(tmp_path / "server") as again:
        assert again.url == server.url
        told = Command("status", str(file), "--json", environment={"PREFECT_API_URL": server.url})
        assert told.finish()["repaired"] == [result["run"]]
        (flow_run,) = httpx.post(f"{server.url}/flow_runs/filter", json={}).json()
        assert flow_run["state_type"] == "COMPLETED"


@pytest.mark.parametrize("kinds", [("cut", "lost"), ("refused",)])
def test_requests_that_fail_now_and_then_cost_an_attempt_at_most(
    tmp_path: Path, lone: dict[str, Any], kinds: tuple[Fault, ...]
) -> None:
    """Every seventh, of whatever kind: of the client, of the engine, and of the websockets that log lines and events take."""
    failed: list[str] = []
    asked = 0

    def fault(request: str) -> Fault | None:
        nonlocal asked
        asked += 1
        if asked % 7:
            return None
        failed.append(request)
        return kinds[len(failed) % len(kinds)]

    file = make_lone(tmp_path / "p")
    with server_of_the_user(tmp_path / "server") as server, faulty_front(server.port, fault) as port:
        command = Command("run", str(file), "--json", environment={"PREFECT_API_URL": f"http://127.0.0.1:{port}/api"})
        code = command.process.wait(timeout=600)
        result = command.finish(code)
        if code:  # then it is reported as an error of ours, and the same command goes on
            assert code == ServiceError.exit_code, command.said
            result = Command("run", str(file), "--json", environment={"PREFECT_API_URL": server.url}).finish()
        flow_runs = httpx.post(f"{server.url}/flow_runs/filter", json={}).json()
    assert len(failed) > 3 and "Traceback" not in command.said
    assert result["weights_digest"] == lone["weights_digest"] and result["metrics"] == lone["metrics"]
    assert "COMPLETED" in {run["state_type"] for run in flow_runs}
