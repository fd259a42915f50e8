"""How does a person look at runs? MLflow's page and Prefect's page over the state of one pipeline, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from flows.services import mlflow_uri, prefect_api
from flows.status import state_of
from penstock.errors import ServiceError

__all__ = ["serve_ui"]

READY_S = 90.0
"""A cold MLflow server on two busy cores was seen to take 25 s."""


def serve_ui(file: Path | None, mlflow_port: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Serve both pages until SIGINT or SIGTERM; configured servers are only named.

    Returns:
        The addresses, `{"status": "done", "mlflow": ..., "prefect": ...}`.

    Raises:
        ServiceError: a page did not come up.
    """
    _, state_dir, _ = state_of(file)
    tracking = mlflow_uri(state_dir)
    asked = threading.Event()
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    server: subprocess.Popen[bytes] | None = None
    try:
        with prefect_api(state_dir) as prefect:
            mlflow_page = tracking
            if not tracking.startswith("http"):
                port = mlflow_port or _free_port()
                mlflow_page = f"http://127.0.0.1:{port}"
                server = _start_mlflow(tracking, state_dir, port)
                _wait_ready(server, mlflow_page, asked)
            say(f"MLflow:  {mlflow_page}")
            say(f"Prefect: {prefect.ui_url}")
            say("Ctrl-C closes them")
            asked.wait()
            return {"status": "done", "mlflow": mlflow_page, "prefect": prefect.ui_url}
    finally:
        if server is not None:
            _stop(server)
        for number, handler in before.items():
            signal.signal(number, handler)


def _start_mlflow(tracking: str, state_dir: Path, port: int) -> subprocess.Popen[bytes]:
    # One worker and no job runner: as shipped the server is 15 processes, and none of the others serve the page.
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", tracking, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1"]
    command += ["--default-artifact-root", (state_dir / "mlflow" / "artifacts").as_uri()]
    log = state_dir / "mlflow" / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


def _wait_ready(server: subprocess.Popen[bytes], url: str, asked: threading.Event) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and server.poll() is None and not asked.is_set():
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        asked.wait(0.3)
    if not asked.is_set():
        raise ServiceError(f"the MLflow page at {url} did not come up within {READY_S:g} s", next_step="look at .penstock/mlflow/server.log")


def _stop(server: subprocess.Popen[bytes]) -> None:
    # The server is a parent with workers, in a process group of its own.
    try:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    except ProcessLookupError:
        return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
