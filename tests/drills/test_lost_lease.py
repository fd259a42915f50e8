"""A process that another one has given up for dead: it ends as that, and writes nothing over the new owner's records."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from penstock.storage import Storage
from penstock.tasks.records.ledger import run_leases
from tests.drills.project import make_project
from tests.runs.forked import Command

pytestmark = pytest.mark.drill


def test_a_run_that_lost_its_lease_while_it_trained_ends_as_that_and_saves_nothing(tmp_path: Path, prefect_url: str) -> None:
    file = make_project(tmp_path / "drill", epochs=20, files=2)
    saves_at_the_end_alone = ["--set", "train.checkpoint={every_epoch: false}"]
    command = Command(
        "run",
        str(file),
        "--json",
        *saves_at_the_end_alone,
        environment={"PREFECT_API_URL": prefect_url, "DRILL_PAUSE_S": "0.2"},
    )
    command.wait_for("a step", lambda: "  train: " in command.said)
    storage = Storage(str(file.parent / ".penstock"))
    (run,) = storage.list("runs")
    lease = f"{run_leases('drill')}/{run}"
    held = storage.read_json(f"{lease}/00000001.json")
    usurper = {**held, "owner": "usurper", "process": {**held["process"], "host": "elsewhere"}}
    storage.write_json(f"{lease}/00000002.json", usurper)

    result = command.finish(code=6)
    assert result["error"]["kind"] == "LeaseHeldError"
    assert "was taken over by pid" in command.said and "on elsewhere" in command.said
    assert "saved" not in command.said and "stopped by" not in command.said and "Traceback" not in command.said

    records = [storage.read_json(f"runs/{run}/{name}") for name in ("run.json", "attempts/0001.json")]
    assert [record["status"] for record in records] == ["running", "running"], "the new owner's to change"
    assert storage.list(f"runs/{run}/checkpoints") == []
    assert storage.read_json(f"{lease}/00000002.json") == usurper
    with sqlite3.connect(next(file.parent.rglob("mlflow.db"))) as database:
        assert database.execute("select status from runs").fetchall() == [("RUNNING",)]
