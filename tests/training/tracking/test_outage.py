"""Does an MLflow server that is killed while points stream in, and restarted later, end up with every point exactly once?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from penstock.storage import Storage
from penstock.training.checkpoint.fence import Writer
from penstock.training.checkpoint.journal import read_journal, seal_points, truncate_journal
from penstock.training.events import Point
from penstock.training.tracking.mlflow_tracker import MlflowTracker
from tests.runs.servers import eventually, free_port
from tests.training.tracking_cases import checkpoint_at


class MlflowServer:
    """A real `mlflow server`, one worker, on SQLite below `folder`; may be killed and started again on its port."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.folder = folder
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store = f"sqlite:///{self.folder}/server.db"
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--host", "127.0.0.1", "-w", "1"]
        command += ["--port", str(self.port), "--artifacts-destination", str(self.folder / "artifacts")]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        log = open(self.folder / "server.log", "ab")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        log.close()
        eventually(self._answers, 300, "the MLflow server", every_s=0.2)

    def kill(self) -> None:
        """SIGKILL to the server and its worker at once, as a node that dies would look."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, (self.folder / "server.log").read_text()
        try:
            return bool(urllib.request.urlopen(f"{self.uri}/health", timeout=2))
        except (urllib.error.URLError, OSError):
            return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path)
    server.start()
    yield server
    server.kill()


def open_tracker(server: MlflowServer, folder: Path, **more: object) -> MlflowTracker:
    options = {"outbox": Storage(str(folder / "run")), **more}
    return MlflowTracker.open(server.uri, "demo", "run", **options)  # type: ignore[arg-type]


@pytest.mark.drill
def test_outages_lose_no_point_and_block_nothing(server: MlflowServer, tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "run"))
    first = open_tracker(server, tmp_path)
    unsealed: list[Point] = []

    def execute(tracker: MlflowTracker, steps: range, shift: int = 0) -> None:
        for step in steps:
            point = Point(1_700_000_000_000 + step + shift, step, {"train/loss": 1.0 / step, "train/rows_per_s": float(step)})
            tracker.points([point])
            unsealed.append(point)

    execute(first, range(1, 301))
    assert first.drain(60) == 0
    execute(first, range(301, 401))
    server.kill()
    execute(first, range(401, 1401))
    # All steps above are queued while no server exists: nothing waited for it.
    assert first.drain(0.0) >= 1000
    seal_points(storage, Writer(1), 1400, unsealed)
    unsealed.clear()
    first.checkpoints([checkpoint_at(1400, {"train/loss": 1.0 / 1400})])
    server.start()
    execute(first, range(1401, 1501))
    assert first.drain(120) == 0
    check_history(server, first.run_id, 1500)
    assert checkpoints_at(server, first.run_id, tmp_path) == ["step-1400"]

    # The next outage outlives two drivers. One ends, and says what is left to be told; the other dies at step 1600, and its
    # last checkpoint is that of step 1550.
    ended = open_tracker(server, tmp_path / "ended")
    assert ended.drain(60) == 0
    server.kill()
    ended.log_metrics({"test/accuracy": 0.9}, step=10)
    ended.log_json("figures/curve.json", {"a": 1})
    assert ended.close("FINISHED", drain_s=1.0) == 3 and not ended.all_sent
    left = Storage(str(tmp_path / "ended" / "run"))
    assert MlflowTracker.repair(server.uri, ended.run_id, status="KILLED", outbox=left) == "UNKNOWN"
    execute(first, range(1501, 1551))
    seal_points(storage, Writer(1), 1550, unsealed)
    first.checkpoints([checkpoint_at(1550)])
    execute(first, range(1551, 1601))
    outbox = tmp_path / "run" / "outbox.json"
    eventually(lambda: outbox.exists() and "checkpoints.json" in outbox.read_text(), 60, "the outbox", every_s=0.05)
    # From here on `first` stands for a killed process: it gets no chance to write anything more.
    first._sender._stopping = True
    server.start()
    truncate_journal(storage, 1550)
    second = open_tracker(server, tmp_path, run_id=first.run_id, attempt=2)
    second.points(read_journal(storage, 1550, after_step=second.complete_step()))
    execute(second, range(1551, 1651), shift=7)
    assert second.close("FINISHED", drain_s=120) == 0 and second.all_sent
    check_history(server, first.run_id, 1650)
    client = MlflowClient(server.uri)
    assert client.get_run(first.run_id).info.status == "FINISHED"
    assert checkpoints_at(server, first.run_id, tmp_path) == ["step-1550"], "from the outbox"
    assert not outbox.exists()

    assert MlflowTracker.repair(server.uri, ended.run_id, status="KILLED", outbox=left, drain_s=60) == "FINISHED"
    assert client.get_run(ended.run_id).data.metrics == {"test/accuracy": 0.9}
    assert [file.path for file in client.list_artifacts(ended.run_id, "figures")] == ["figures/curve.json"]


def checkpoints_at(server: MlflowServer, run_id: str, folder: Path) -> list[str]:
    found = Path(MlflowClient(server.uri).download_artifacts(run_id, "checkpoints.json", str(folder)))
    return [each["name"] for each in json.loads(found.read_text())]


def check_history(server: MlflowServer, run_id: str, last: int) -> None:
    client = MlflowClient(server.uri)
    for key in ("train/loss", "train/rows_per_s"):
        assert [metric.step for metric in client.get_metric_history(run_id, key)] == list(range(1, last + 1))
