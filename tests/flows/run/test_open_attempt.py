"""A new attempt sends what an earlier one left unsent, and does not read again what the tracked run has."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import mlflow.artifacts
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from mlflow.tracking import MlflowClient

from penstock.errors import PreflightError, ResumeError
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.plan import plan_pipeline
from penstock.storage import Storage
from tests.drills.project import make_project
from tests.drills.without_servers import leave_out_servers, run_here

pytestmark = pytest.mark.slow


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    leave_out_servers(monkeypatch)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    return make_project(tmp_path / "p", epochs=1, files=1)


def profile_of(run_id: str) -> object:
    return mlflow.artifacts.load_dict(f"runs:/{run_id}/data/profile.json")


def test_outbox_of_attempt_without_end_is_sent(file: Path) -> None:
    first = run_here(file)
    storage, run_id = Storage(str(file.parent / ".penstock")), first["mlflow_run_id"]
    folder = f"runs/{first['run']}"
    closed = storage.read_json(f"{folder}/attempts/0001.json")
    assert (closed["status"], closed["sent_to"]) == ("done", run_id)
    killed = json.dumps({**closed, "status": "running", "ended": None, "sent_to": None})
    for number, left in enumerate((killed, "{"), 1):  # the newest record may be torn
        storage.write_bytes(f"{folder}/attempts/{number:04d}.json", left.encode())
        tags = {"kind": "tags", "args": {"tags": {f"left.{number}": "unsent"}}}
        storage.write_json(f"{folder}/outbox.json", {"operations": [tags]})
        assert run_here(file)["mlflow_run_id"] == run_id
        assert MlflowClient().get_run(run_id).data.tags[f"left.{number}"] == "unsent"
        assert not storage.exists(f"{folder}/outbox.json")


def test_profile_is_read_for_a_tracked_run_without_it(file: Path) -> None:
    first = run_here(file)["mlflow_run_id"]
    storage, shown = Storage(str(file.parent / ".penstock")), profile_of(first)
    (profile,) = storage.tree("profiles")
    kept = storage.read_bytes(profile)
    storage.delete(profile)
    again = run_here(file)
    assert (again["mlflow_run_id"], profile_of(first)) == (first, shown), "it is not read again"
    assert {stage["outcome"] for stage in again["stages"]} == {"reused"}
    storage.write_bytes(profile, kept)
    MlflowClient().delete_run(first)
    second = run_here(file)["mlflow_run_id"]
    assert second != first and profile_of(second) == shown
    assert len(MlflowClient().get_run(second).inputs.dataset_inputs) == 2


def test_prepared_rows_decide_about_file_of_test_rows(file: Path) -> None:
    text = file.read_text().replace("  label: label\n", "  label: label\n  test: {by: day, after: 2026-01-02}\n")
    file.write_text(text.replace("preprocess:\n", "preprocess:\n  - drop: [day]\n"))
    part = file.parent / "data" / "train" / "part-0.parquet"
    rows = pq.read_table(part)

    def write(name: str, day: int, means: pa.ChunkedArray) -> None:
        table = rows.set_column(rows.column_names.index("mean"), "mean", means)
        days = pa.array([datetime.date(2026, 1, day)] * table.num_rows)
        pq.write_table(table.append_column("day", days), part.with_name(name))

    write("part-0.parquet", 1, rows["mean"])
    write("part-1.parquet", 2, rows["mean"])
    first = run_here(file)
    others = pc.add(rows["mean"], pa.scalar(1, pa.float32()))
    write("part-1.parquet", 2, others)
    for overrides, then in (([], "depends"), (["train.learning_rate=0.5"], "run")):
        planned = plan_pipeline(load_spec(file, overrides))
        assert (planned["decision"], {stage["action"] for stage in planned["stages"][4:]}) == ("new run", {then})
    again = run_here(file)
    assert (again["run"], again["stages"][4]["outcome"]) == (first["run"], "reused")

    storage, record = Storage(str(file.parent / ".penstock")), f"runs/{first['run']}/run.json"
    storage.write_json(record, {**storage.read_json(record), "status": "killed", "done_key": None})
    storage.delete(f"runs/{first['run']}/stages/train.json")
    write("part-0.parquet", 1, others)
    for _ in range(2):  # before and after its rows are prepared
        with pytest.raises(ResumeError, match="is not finished, and it cannot continue") as refused:
            run_here(file)
        assert refused.value.problems == ("files: changed train/part-0.parquet",)
    write("part-0.parquet", 1, rows["mean"])
    write("part-1.parquet", 2, pc.add(others, others))
    assert {stage["action"] for stage in plan_pipeline(load_spec(file))["stages"][4:]} == {"depends"}
    with pytest.MonkeyPatch.context() as smaller, pytest.raises(PreflightError, match=r"0\.4 more CPU"):
        smaller.setattr("penstock.flows.preflight.checks.machine_cpus", lambda: 0.1)
        plan_pipeline(load_spec(file))  # this run trains on, unlike the finished one
    again = run_here(file)
    assert (again["run"], again["weights_digest"]) == (first["run"], first["weights_digest"])
