"""Stages under a real Prefect server: what another try may mend is retried; a record is believed after a look at the data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Failed

from penstock.errors import ServiceError
from penstock.tasks import register, stage
from penstock.tasks.context import RunContext, StageOutcome
from tests import ROOT

SCRIPT = """
import json, sys
from pathlib import Path
from types import SimpleNamespace

state = Path(sys.argv[1])

from penstock.flows.servers.services import prefect_api

with prefect_api(state):
    from prefect import flow
    from prefect.utilities.annotations import quote

    from penstock import errors
    from penstock.storage import Storage
    from penstock.tasks.records.keys import StageKey
    from penstock.tasks.records.ledger import Ledger
    from penstock.tasks.stage import Stage, stage_task

    def perform(folder, error, failures):
        calls = []

        def work(ctx):
            calls.append(1)
            if len(calls) <= failures:
                raise getattr(errors, error)("the store was away")
            print("of the work")
            (folder / "data").write_text("rows")
            return {"rows": 4}, "ran"

        def verify(context, output):
            return None if (folder / "data").exists() else "its data are gone"

        storage = Storage(str(folder / "storage"))
        told = []
        ctx = SimpleNamespace(
            keys={"read": StageKey(stage="read", key="k", inputs={})},
            run=SimpleNamespace(run="r", pipeline="p"),
            ledger=Ledger(storage),
            project=SimpleNamespace(storage=storage),
            will_train=False,
            outcomes={},
            before=None,
            now=None,
            reporter=SimpleNamespace(finished=lambda outcome: None, report=told.append),
            tracker=SimpleNamespace(url=None, run_id="m"),
            state_dir=folder,
            warn=told.append,
        )
        stage = Stage("read", work, lambda output: (("rows", str(output["rows"])),), verify)

        @flow
        def once():
            return stage_task(stage).with_options(retry_delay_seconds=[0, 0])(quote(ctx), return_state=True)

        ends = []
        for remove in (False, False, True):
            if remove:
                (folder / "data").unlink(missing_ok=True)
            state = once(return_state=True)
            ends.append([state.name, ctx.outcomes["read"].outcome if ctx.outcomes else None])
        return {"ends": ends, "calls": len(calls), "told": told}

    found = {}
    for error, failures in (("ServiceError", 2), ("DataError", 1)):
        (folder := state / error).mkdir(parents=True)
        found[error] = perform(folder, error, failures)
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_prefect_artifact_shows_promotion_reason(shared_prefect: str) -> None:
    reason = "alias 'live' moves to version 2: test/accuracy 0.9000, where version 1 has 0.8000"
    output = {"uri": "models:/m/2", "tracking_uri": "sqlite:///mlflow.db", "alias": "live", "promotion": {"reason": reason}}
    pipeline = f"promoted_{uuid.uuid4().hex[:8]}"
    context = SimpleNamespace(
        run=SimpleNamespace(run="r", pipeline=pipeline),
        tracker=SimpleNamespace(url="http://mlflow/r"),
        attempt=SimpleNamespace(changed=()),
        warn=pytest.fail,
    )
    outcome = StageOutcome("register", "k" * 32, "ran", 1.5, output, register.STAGE.facts(output), ("no such key",))

    @flow
    def attempt() -> None:
        stage._publish(cast("RunContext", context), outcome)

    with temporary_settings({PREFECT_API_URL: shared_prefect}):
        attempt()
    key = f"{pipeline.replace('_', '-')}-register"
    shown = httpx.get(f"{shared_prefect}/artifacts/{key}/latest").json()
    rows = {row["name"]: row["value"] for row in json.loads(shown["data"])}
    assert (rows["promotion"], rows["alias"], rows["model"], rows["outcome"]) == (reason, "live", "models:/m/2", "ran")
    assert "of run [r](http://mlflow/r)" in shown["description"]


@pytest.fixture(scope="module")
def found(prefect_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `SCRIPT` prints of a stage with two errors of a store, and of one with an error of its data, by error."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path_factory.mktemp("stages") / "state")],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "PREFECT_API_URL": prefect_url, "PREFECT_LOGGING_LEVEL": "CRITICAL"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.slow
def test_stage_retries_service_errors_and_verifies_records(found: dict[str, Any]) -> None:
    shown = found["ServiceError"]
    assert [outcome for _, outcome in shown["ends"]] == ["ran", "reused", "ran"]
    assert shown["calls"] == 4
    printed = "read: of the work"
    assert shown["told"] == [printed, "read: the recorded output is not used: its data are gone", printed]


@pytest.mark.slow
def test_data_error_is_not_retried(found: dict[str, Any]) -> None:
    shown = found["DataError"]
    assert shown["ends"][0] == ["Failed", None]
    assert shown["calls"] == 3  # one that failed, one that succeeded, none for the reuse, one after the data were removed


def test_store_error_after_restarts_is_not_retried() -> None:
    error = ServiceError("the store was away")
    stage_fails: Any = partial(stage._is_transient, cast("Any", None), cast("Any", None), Failed(data=error))
    assert stage_fails()
    error.retried = True
    assert not stage_fails()
