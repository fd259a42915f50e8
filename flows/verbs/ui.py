"""Serve MLflow's page and Prefect's page of one pipeline until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from penstock.errors import ServiceError
from penstock.flows.servers.services import prefect_api
from penstock.flows.verbs.status import state_of
from penstock.machine.stopping import StopRequest, stopping_on_signals
from penstock.progress import announce_wait
from penstock.redact import redact_text
from penstock.training.tracking.mlflow_store import TRAINING_VIEW, database_of, mlflow_uri, relocate_artifacts

__all__ = ["serve_ui"]

_DATABASES = ("sqlite:", "postgresql", "mysql", "mssql")
"""Tracking URIs of stores without a page of their own."""

READY_S = 90.0
"""A cold MLflow server took 25 s on two busy cores."""


def serve_ui(file: Path | None, report: Callable[[str], None]) -> dict[str, Any]:
    """Serve both pages on 127.0.0.1 until SIGINT or SIGTERM; of configured servers, only print the address.

    Args:
        report: prints a line; the addresses are printed once they answer.

    Raises:
        SpecError: there is neither a pipeline file nor a state folder.
        ServiceError: a page did not start.
    """
    _, state_dir, name = state_of(file)
    tracking = mlflow_uri(state_dir)
    closing = StopRequest()
    closing.graceful = True  # a first signal only ends the wait
    with (
        stopping_on_signals(closing),
        prefect_api(state_dir) as prefect,
        _mlflow_page(tracking, state_dir, closing.stop, name) as mlflow,
    ):
        pages = {"mlflow": redact_text(mlflow), "prefect": redact_text(prefect.ui_url)}
        if not closing.stop.is_set():
            report(f"MLflow:  {pages['mlflow']}")
            report(f"Prefect: {pages['prefect']}")
        if prefect.embedded or tracking.startswith(_DATABASES):
            report("Ctrl-C closes them")
            closing.stop.wait()
        return {"status": "done", **pages}


@contextlib.contextmanager
def _mlflow_page(tracking: str, state_dir: Path, closing: threading.Event, pipeline: str | None) -> Iterator[str]:
    """Yield the address of MLflow's page; without a configured server, serve one for the block."""
    if not tracking.startswith(_DATABASES):
        yield _list_of_runs(tracking, pipeline) if tracking.startswith(("http://", "https://")) else tracking
        return
    database = database_of(tracking)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    if database is not None:
        with contextlib.suppress(sqlite3.Error):  # the server reports it
            relocate_artifacts(database)
    log = state_dir / "mlflow" / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    server = _start_mlflow(tracking, state_dir, port, log)
    try:
        url = f"http://127.0.0.1:{port}"
        with announce_wait("MLflow's page"):
            _wait_ready(server, url, log, closing)
        yield url if closing.is_set() else _list_of_runs(url, pipeline)
    finally:
        _stop(server)


def _start_mlflow(tracking: str, state_dir: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        # Not an argument: the URI may hold a password, and arguments are visible to all users of the machine.
        "MLFLOW_BACKEND_STORE_URI": tracking,
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": (state_dir.absolute() / "mlflow" / "artifacts").as_uri(),
        # By default the server starts 15 processes, with a job runner that these pages do not need.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    command = [sys.executable, "-P", "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with open(log, "wb") as output:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def _wait_ready(server: subprocess.Popen[bytes], url: str, log: Path, closing: threading.Event) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and server.poll() is None and not closing.is_set():
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        closing.wait(0.3)
    if not closing.is_set():
        ended = (
            f"ended with code {server.returncode}" if server.returncode is not None else f"did not answer within {READY_S:g} s"
        )
        raise ServiceError(
            f"the MLflow server for {url} {ended}",
            problems=log.read_text(errors="replace").splitlines()[-5:],
            next_step=f"read {log}, and try again",
        )


def _list_of_runs(url: str, pipeline: str | None) -> str:
    """Return the address of the pipeline's runs, or of the only pipeline there is, else of the list of all."""
    try:
        answer = httpx.post(f"{url}/api/2.0/mlflow/experiments/search", json={"max_results": 1000}, timeout=10)
        found = {each["name"]: each for each in answer.raise_for_status().json().get("experiments", [])}
    except (httpx.HTTPError, ValueError, KeyError):
        return url
    found.pop("Default", None)  # MLflow's own, which penstock never uses
    only = next(iter(found)) if len(found) == 1 else None
    chosen = found.get(pipeline or only or "")
    if chosen is None:
        return f"{url}/#/experiments{TRAINING_VIEW}"
    return f"{url}/#/experiments/{chosen['experiment_id']}/runs{TRAINING_VIEW}"


def _stop(server: subprocess.Popen[bytes]) -> None:
    # The server is a parent with workers, in a process group of its own.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
