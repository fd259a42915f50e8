"""What Prefect keeps of runs that are cleaned goes with all that belongs to it; what it keeps of others stays."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, LogCreate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.types import DateTime

from penstock.errors import ServiceError
from penstock.flows.run.retention import free_flow_runs
from penstock.flows.servers.prefect_server import ServerFiles, ServerInfo
from penstock.storage import Storage
from penstock.tasks.records.ledger import Cleaned, Ledger
from penstock.tasks.room import flow_runs
from tests.runs.servers import eventually
from tests.tasks.room.recorded_nights import begin

pytestmark = pytest.mark.slow  # where no other test of its process has started the server


@flow
def attempt() -> None:
    """Of a pipeline."""


@task
def stage() -> None:
    """Of an attempt."""


@pytest.fixture
def client(shared_prefect: str) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: shared_prefect}), get_client(sync_client=True) as made:
        yield made


def recorded(client: SyncPrefectClient, *tags: str) -> UUID:
    """A flow run with a task run, an artifact and a line of its log."""
    made = client.create_flow_run(attempt, tags=tags).id
    client.create_task_run(stage, made, dynamic_key="0")
    client.create_artifact(ArtifactCreate(key="p-read", type="markdown", data="rows", flow_run_id=made))
    line: dict[str, Any] = {"name": "p", "level": 20, "message": "read", "timestamp": DateTime.now("UTC")}
    client.create_logs([LogCreate(flow_run_id=made, **line)])
    return made


def kept(client: SyncPrefectClient, flow_run: UUID) -> dict[str, int]:
    chosen = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
    artifacts = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]))
    logs = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run]))
    found = {
        "flow runs": client.read_flow_runs(flow_run_filter=chosen),
        "task runs": client.request("POST", "/task_runs/filter", json={"flow_runs": {"id": {"any_": [str(flow_run)]}}}).json(),
        "artifacts": client.read_artifacts(artifact_filter=artifacts),
        "logs": client.read_logs(logs),
    }
    return {what: len(each) for what, each in found.items()}


def test_flow_runs_of_cleaned_runs_go_with_all_that_belongs_to_them_and_others_stay(
    client: SyncPrefectClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, pipeline = Ledger(Storage(str(tmp_path / "state"))), f"p-{uuid.uuid4().hex[:8]}"  # the server is that of all tests
    for name in ("r1", "r2"):
        run = begin(ledger, name, name, pipeline=pipeline)
        ledger.save_run(run.model_copy(update={"cleaned": Cleaned(at="2026", by="me") if name == "r1" else None}))
    gone = [recorded(client, pipeline, "r1", status) for status in ("killed", "done", "done")]
    stay = [recorded(client, pipeline, "r2", "done"), recorded(client, "another", "r1"), recorded(client, pipeline)]
    monkeypatch.setattr(flow_runs, "_PAGE_ROWS", 2)
    own = ServerFiles(tmp_path)
    assert free_flow_runs(ledger, pipeline, tmp_path) == 0, "the server of this environment is not that of the project"
    own.prepare()
    own.write_info(ServerInfo(pid=1, port=1, url=str(PREFECT_API_URL.value())))
    assert free_flow_runs(ledger, pipeline, tmp_path) == 3
    for identity in gone:
        none = {"flow runs": 0, "task runs": 0, "artifacts": 0, "logs": 0}
        eventually(lambda identity=identity, none=none: kept(client, identity) == none, 20, "the server deletes logs", 0.05)
    for identity in stay:
        assert kept(client, identity) == {"flow runs": 1, "task runs": 1, "artifacts": 1, "logs": 1}
    assert free_flow_runs(ledger, pipeline, tmp_path) == 0


def test_a_server_that_is_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    away = "http://127.0.0.1:9/api"
    monkeypatch.setenv("PREFECT_API_URL", away)
    with temporary_settings({PREFECT_API_URL: away, PREFECT_CLIENT_MAX_RETRIES: 0}), pytest.raises(ServiceError, match=away):
        flow_runs.remove_flow_runs("p", {"r1"})
