"""Does one MLflow run hold what all attempts did, once, with an honest status? On MLflow's SQLite store."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from penstock.errors import ServiceError
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.schema import ColumnInfo, FeedSchema, Split
from penstock.storage import Storage
from penstock.training.events import Point
from penstock.training.tracking.mlflow_backend import open_client
from penstock.training.tracking.mlflow_tracker import MlflowTracker
from penstock.training.tracking.tracker import RunStatus
from tests import ROOT
from tests.penstock.databases import MARK, execute, marked, tables_of
from tests.runs.servers import eventually
from tests.training.tracking_cases import checkpoint_at


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for the module: creating its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow/mlflow.db"


def open_tracker(uri: str, **more: Any) -> MlflowTracker:
    return MlflowTracker.open(uri, "demo", "run-1", **more)


def history(uri: str, run_id: str, key: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in MlflowClient(uri).get_metric_history(run_id, key)]


def train(tracker: MlflowTracker, steps: range, shift: float = 0.0) -> None:
    for step in steps:
        tracker.points([Point(1_000_000 + step, step, {"train/loss": step + shift, "rate": 1e-3})])


def test_repeated_steps_are_logged_once(uri: str) -> None:
    first = open_tracker(uri)
    train(first, range(1, 14))
    assert first.close("KILLED") == 0
    second = open_tracker(uri, run_id=first.run_id, attempt=2)
    assert second.run_id == first.run_id
    train(second, range(11, 21), shift=0.5)
    assert second.close("FINISHED") == 0
    steps = history(uri, first.run_id, "train/loss")
    assert [step for step, _ in steps] == list(range(1, 21))
    assert steps[12] == (13, 13.0) and steps[13] == (14, 14.5)


def test_idle_attempt_keeps_the_end_of_a_finished_run(uri: str) -> None:
    tracker = open_tracker(uri)
    train(tracker, range(1, 3))
    tracker.close("FINISHED")
    client = MlflowClient(uri)
    ended = client.get_run(tracker.run_id).info.end_time
    idle = open_tracker(uri, run_id=tracker.run_id, attempt=2)
    idle.close("FINISHED")
    assert client.get_run(tracker.run_id).info.end_time == ended
    busy = open_tracker(uri, run_id=tracker.run_id, attempt=3)
    train(busy, range(3, 5))
    busy.close("FINISHED")
    assert client.get_run(tracker.run_id).info.end_time > ended


def test_pages_name_run_source_and_user(uri: str) -> None:
    tracker = MlflowTracker.open(
        uri,
        "pages",
        "pages-20261123-a1",
        tags={"source": "shop/pipeline.yaml", "user": "ada", "description": "Data: 9 rows", "git.commit": "c0ffee"},
        params={"train": {"epochs": 3, "max_steps": None}, "preprocess": [{"label_encoder": {}, "imputer": None}]},
    )
    tracker.close("FINISHED")
    client = MlflowClient(uri)
    run = client.get_run(tracker.run_id)
    assert (run.info.run_name, run.data.tags["mlflow.user"]) == ("20261123-a1", "ada")
    assert run.data.tags["mlflow.source.name"] == "shop/pipeline.yaml"
    assert run.data.tags["mlflow.source.git.commit"] == "c0ffee"
    assert run.data.tags["mlflow.note.content"] == "Data: 9 rows"
    assert run.data.params == {"train.epochs": "3"}
    assert client.get_experiment(tracker.run.experiment_id).tags["mlflow.experimentKind"] == "custom_model_development"


def test_server_has_a_page_of_the_run_file_has_none(uri: str) -> None:
    tracker = open_tracker(uri)
    tracker.close("FINISHED")
    assert tracker.url is None
    tracker.tracking_uri = "http://user:hunter2@mlflow:5000/"
    assert tracker.url is not None and f"/runs/{tracker.run_id}?workflowType=" in tracker.url and "hunter2" not in tracker.url


def test_status_follows_the_attempt(uri: str) -> None:
    tracker = open_tracker(uri)
    client = MlflowClient(uri)
    assert client.get_run(tracker.run_id).info.status == "RUNNING"
    tracker.close("FAILED")
    assert client.get_run(tracker.run_id).info.status == "FAILED"
    again = open_tracker(uri, run_id=tracker.run_id, attempt=2)
    assert client.get_run(tracker.run_id).info.status == "RUNNING"
    again.close("FINISHED")
    again.close("FAILED")
    assert client.get_run(tracker.run_id).info.status == "FINISHED"


@pytest.mark.parametrize(("status", "complete"), [("FAILED", 6), ("FINISHED", 7)])
def test_finished_run_has_every_point_of_its_last_step(uri: str, status: RunStatus, complete: int) -> None:
    tracker = open_tracker(uri)
    tracker.points([Point(5, 7, {"train/loss": 1.0})])
    tracker.close(status)
    again = open_tracker(uri, run_id=tracker.run_id, attempt=2)
    assert again.complete_step() == complete
    again.close(status)


def test_repair_sends_outbox_and_journal_of_killed_driver(uri: str, tmp_path: Path) -> None:
    outbox = Storage(str(tmp_path))
    tracker = open_tracker(uri, outbox=outbox)
    tracker.drain()
    (tmp_path / "outbox.json").write_text(
        json.dumps(
            {"operations": [{"kind": "tags", "args": {"tags": {"late": "yes"}}}], "points": [[5, 1, {"train/loss": 1.0}]]}
        )
    )
    journal = [Point(5, 1, {"train/loss": 1.0}), Point(6, 2, {"train/loss": 2.0})]
    assert MlflowTracker.repair(uri, tracker.run_id, status="KILLED", points=journal, outbox=outbox) == "KILLED"
    run = MlflowClient(uri).get_run(tracker.run_id)
    assert run.data.tags["late"] == "yes"
    assert history(uri, tracker.run_id, "train/loss") == [(1, 1.0), (2, 2.0)]
    assert not (tmp_path / "outbox.json").exists()


def test_status_in_outbox_outranks_repair(uri: str, tmp_path: Path) -> None:
    tracker = open_tracker(uri)
    tracker.drain()
    (tmp_path / "outbox.json").write_text('{"operations": [{"kind": "status", "args": {"status": "FINISHED"}}]}')
    assert MlflowTracker.repair(uri, tracker.run_id, status="KILLED", outbox=Storage(str(tmp_path))) == "FINISHED"


def test_repair_sets_the_status_last(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = open_tracker(uri)
    tracker.drain()
    left = {"operations": [{"kind": "status", "args": {"status": "FINISHED"}}], "points": [[5, 1, {"train/loss": 1.0}]]}
    (tmp_path / "outbox.json").write_text(json.dumps(left))
    sent: list[str] = []
    kind = type(MlflowTracker.find(uri, tracker.run_id))
    points, perform = kind.send_points, kind.perform
    monkeypatch.setattr(kind, "send_points", lambda self, *given: (sent.append("points"), points(self, *given)))
    monkeypatch.setattr(kind, "perform", lambda self, todo: (sent.append(todo.kind), perform(self, todo)))
    journal = [Point(6, 2, {"train/loss": 2.0})]
    outbox = Storage(str(tmp_path))
    assert MlflowTracker.repair(uri, tracker.run_id, status="KILLED", points=journal, outbox=outbox) == "FINISHED"
    assert sent == ["points", "status"]


def test_stale_status_does_not_end_new_attempt(uri: str, tmp_path: Path) -> None:
    tracker = open_tracker(uri)
    tracker.close("FAILED")
    (tmp_path / "outbox.json").write_text('{"operations": [{"kind": "status", "args": {"status": "FAILED"}}]}')
    again = open_tracker(uri, run_id=tracker.run_id, attempt=2, outbox=Storage(str(tmp_path)))
    assert again.drain() == 0
    assert MlflowClient(uri).get_run(tracker.run_id).info.status == "RUNNING"
    eventually(lambda: not (tmp_path / "outbox.json").exists(), 30, "no outbox, which repair would prefer", every_s=0.01)
    again.close("FINISHED")


def test_repair_keeps_finished_run_and_reports_unknown_one(uri: str) -> None:
    tracker = open_tracker(uri)
    tracker.close("FINISHED")
    assert MlflowTracker.repair(uri, tracker.run_id, status="KILLED") == "FINISHED"
    assert MlflowTracker.repair(uri, "0" * 32, status="KILLED") == "UNKNOWN"


def test_params_changed_between_attempts_become_tags(uri: str) -> None:
    first = open_tracker(uri, params={"train": {"epochs": 1, "lr": 0.1}, "layers": [8, 8]})
    first.close("KILLED")
    second = open_tracker(uri, run_id=first.run_id, attempt=2, params={"train": {"epochs": 5, "lr": 0.1}, "note": "x" * 7000})
    second.close("FINISHED")
    data = MlflowClient(uri).get_run(first.run_id).data
    assert data.params["train.epochs"] == "1" and data.params["layers"] == "[8, 8]"
    assert data.tags["spec.train.epochs.attempt_2"] == "5" and "spec.train.lr.attempt_2" not in data.tags
    assert data.params["note"] == "x" * 6000
    assert data.tags["penstock.attempt"] == "2"


def test_secrets_reach_neither_params_nor_tags_nor_artifacts(uri: str, tmp_path: Path) -> None:
    spec = {
        "storage": "s3://user:hunter2@bucket/x",
        "params": {"api_key": "hunter2", "max_tokens": 8},
        "env": {"AWS_SECRET_ACCESS_KEY": "hunter2", "AWS_ACCESS_KEY_ID": "AKIAABCDEFGHIJKLMNOP"},
    }
    tracker = open_tracker(uri, params=spec, tags={"source": "https://user:hunter2@host/x"})
    tracker.log_json("spec.json", spec)
    tracker.log_text("notes/spec.yaml", "url: http://user:hunter2@host/\nkey: AKIAABCDEFGHIJKLMNOP\n")
    assert tracker.close("FINISHED") == 0
    client = MlflowClient(uri)
    data = client.get_run(tracker.run_id).data
    seen = json.dumps([data.params, data.tags])
    for name in ("spec.json", "notes/spec.yaml"):
        seen += Path(client.download_artifacts(tracker.run_id, name, str(tmp_path))).read_text()
    assert "hunter2" not in seen and "AKIAABCDEFGHIJKLMNOP" not in seen
    assert data.params["params.max_tokens"] == "8"


def test_metric_names_are_fitted_to_mlflow(uri: str) -> None:
    tracker = open_tracker(uri)
    tracker.log_metrics({"recall@5": 0.5, "a//b": 1.0, "x" * 300: 2.0, "nan": math.nan}, step=3)
    assert tracker.close("FINISHED") == 0
    metrics = MlflowClient(uri).get_run(tracker.run_id).data.metrics
    assert metrics["recall_5"] == 0.5 and metrics["a/b"] == 1.0 and math.isnan(metrics["nan"])
    assert len(metrics) == 4


def checkpoints_at(uri: str, run_id: str, folder: Path) -> list[dict[str, Any]]:
    found = Path(MlflowClient(uri).download_artifacts(run_id, "checkpoints.json", str(folder)))
    return json.loads(found.read_text())  # type: ignore[no-any-return]


def test_checkpoints_are_a_list_and_not_models(uri: str, tmp_path: Path) -> None:
    tracker = open_tracker(uri)
    measured = {"train/loss": 0.5, "train/nan": None}
    for present in ((2,), (2, 4)):
        tracker.checkpoints([checkpoint_at(step, measured) for step in present])
    tracker.drain()
    first, second = checkpoints_at(uri, tracker.run_id, tmp_path)
    assert first == {"name": "step-2", "step": 2, "epoch": 1, "metrics": measured, "uri": "/ckpt/step-2"}
    assert second["name"] == "step-4"
    assert tracker.close("KILLED") == 0
    again = open_tracker(uri, run_id=tracker.run_id, attempt=2)
    again.checkpoints([checkpoint_at(6), checkpoint_at(4)])  # of what the killed attempt wrote and deleted in silence
    again.checkpoints([checkpoint_at(8), checkpoint_at(6), checkpoint_at(4)])
    assert again.close("FINISHED") == 0
    assert [row["name"] for row in checkpoints_at(uri, tracker.run_id, tmp_path)] == ["step-4", "step-6", "step-8"]
    assert not MlflowClient(uri).search_logged_models([tracker.run.experiment_id])


def test_each_split_is_an_input_of_the_run_once(uri: str) -> None:
    schema = FeedSchema(
        columns=(ColumnInfo(name="image", dtype="uint8", shape=(28, 28)), ColumnInfo(name="label", dtype="int64")),
        label="label",
    )
    rows: dict[Split, int] = {"train": 9, "test": 3}
    digests: dict[Split, str] = {"train": "a" * 32, "test": "b" * 32}
    manifest = DatasetManifest(key="k" * 32, feed_schema=schema, rows=rows, content_digest="d" * 32, split_digests=digests)
    run_id = None
    for attempt in (1, 2):
        tracker = open_tracker(uri, run_id=run_id, attempt=attempt)
        run_id = tracker.run_id
        for split in rows:
            profile = {"classes": {"bag": 2}}
            tracker.log_dataset(manifest, split, name=f"fashion {split}", uri="s3://bucket/fashion/", profile=profile)
        assert tracker.close("FINISHED") == 0
    inputs = {given.dataset.name: given for given in MlflowClient(uri).get_run(str(run_id)).inputs.dataset_inputs}
    assert inputs.keys() == {"fashion train", "fashion test"}
    given = inputs["fashion test"]
    assert (given.dataset.digest, given.dataset.source_type) == ("b" * 12, "s3")
    assert [(tag.key, tag.value) for tag in given.tags] == [("mlflow.data.context", "test")]
    assert json.loads(given.dataset.profile) == {"num_rows": 3, "classes": {"bag": 2}}
    assert json.loads(given.dataset.source)["uri"] == "s3://bucket/fashion/" and "image" in given.dataset.schema


def test_metric_measured_again_replaces_the_old_value(uri: str) -> None:
    tracker = open_tracker(uri)
    tracker.log_metrics({"test/accuracy": 0.87}, 7)
    tracker.close("FINISHED")
    later = open_tracker(uri, run_id=tracker.run_id, attempt=2)
    later.log_metrics({"test/accuracy": 0.5}, 7)
    later.log_metrics({"test/accuracy": 0.66}, 7, again=True)
    assert later.close("FINISHED") == 0
    assert MlflowClient(uri).get_run(tracker.run_id).data.metrics == {"test/accuracy": 0.66}


def test_artifacts_lie_beside_the_database(uri: str) -> None:
    tracker = open_tracker(uri)
    tracker.log_figure("figures/confusion.png", b"png")
    tracker.log_json("data/manifest.json", {})
    assert tracker.close("FINISHED") == 0
    root = Path(uri.removeprefix("sqlite:///")).parent / "artifacts" / tracker.run_id / "artifacts"
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*.*")) == ["data/manifest.json", "figures/confusion.png"]


def test_machine_charts_continue_over_attempts(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.01")
    run_id, samples = None, 0
    for attempt in (1, 2):
        tracker = open_tracker(uri, run_id=run_id, attempt=attempt)
        run_id, before = tracker.run_id, samples
        with tracker.charting_machine():
            eventually(lambda: len(loads(uri, str(run_id))) >= before + 2, 60, "two samples", every_s=0.05)  # noqa: B023
        assert tracker.close("KILLED") == 0 and tracker.complete_step() == -1
        found = loads(uri, str(run_id))
        samples = len(found)
        assert [step for step, _ in found] == list(range(samples)) and all(0 <= load <= 100 for _, load in found)


def loads(uri: str, run_id: str) -> list[tuple[int, float]]:
    return history(uri, run_id, "system/system_memory_usage_percentage")


def test_deleted_run_is_replaced_by_a_new_one(uri: str) -> None:
    tracker = open_tracker(uri)
    tracker.close("KILLED")
    MlflowClient(uri).delete_run(tracker.run_id)
    again = open_tracker(uri, run_id=tracker.run_id, attempt=2)
    assert again.run_id != tracker.run_id
    again.close("FINISHED")


def test_silent_server_is_refused_at_open() -> None:
    with pytest.raises(ServiceError, match=r"MLflow at http://127\.0\.0\.1:9 does not answer"):
        open_tracker("http://127.0.0.1:9")


@contextmanager
def answering(answer: Callable[[str], tuple[int, str]]) -> Iterator[str]:
    """The address of a server that answers by the path, and needs no MLflow to be up."""

    class Handler(BaseHTTPRequestHandler):
        def do_any(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, text = answer(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = do_any

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


EXPERIMENT = '{"experiment": {"experiment_id": "1", "name": "demo", "lifecycle_stage": "active"}}'
DENIED = '{"error_code": "PERMISSION_DENIED", "message": "no"}'


@pytest.mark.parametrize(
    ("answer", "words", "advice"),
    [
        (lambda _path: (401, "who are you?"), "refuses the login: .*error code 401", "MLFLOW_TRACKING_PASSWORD"),
        (
            lambda path: (200, EXPERIMENT) if "experiments" in path else (403, DENIED),
            "cannot open the run: PERMISSION_DENIED: no",
            "same command again",
        ),
    ],
)
def test_refusal_of_server_names_next_step(answer: Callable[[str], tuple[int, str]], words: str, advice: str) -> None:
    with answering(answer) as uri, pytest.raises(ServiceError, match=words) as caught:
        open_tracker(uri)
    assert advice in caught.value.next_step


RUN = '{"run": {"info": {"run_id": "a", "run_name": "n", "experiment_id": "1", "status": "RUNNING"}, "data": {}}}'


def test_mlflow_does_not_print_the_login(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(lambda _path: (200, RUN)) as uri:
        open_client(uri.replace("://", "://alice:canary@")).set_terminated("a", "FINISHED")
    assert capsys.readouterr() == ("", "")


def test_unusable_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("this is not a database")
    with pytest.raises(
        ServiceError, match=r"the MLflow database .*mlflow\.db cannot be used: .*file is not a database"
    ) as caught:
        open_tracker(f"sqlite:///{tmp_path}/mlflow.db")
    assert f"fuser {tmp_path}/mlflow.db" in caught.value.next_step


HELD = """
import signal, sys
from sqlalchemy import event
from sqlalchemy.engine import Engine
from penstock.training.tracking.mlflow_backend import connect

made = []

def hold(_connection, _cursor, statement, *_):
    made.extend([statement] * statement.lstrip().startswith("CREATE TABLE"))
    if len(made) == 8:  # some tables are there, most are not
        print("held", flush=True)
        signal.pause()

event.listen(Engine, "after_cursor_execute", hold)
connect(sys.argv[1], "demo")
"""


def test_database_can_be_made_again_after_a_kill(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    environment = {**os.environ, "PENSTOCK_CACHE_DIR": str(tmp_path / "cache")}  # no database to copy
    command = [sys.executable, "-c", HELD, uri]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        child.kill()
    making = tmp_path / "mlflow" / "mlflow.db.making"
    assert making.stat().st_size > 10_000
    assert not (tmp_path / "mlflow" / "mlflow.db").exists()
    tracker = open_tracker(uri)
    train(tracker, range(1, 3))
    assert tracker.close("FINISHED") == 0
    assert [step for step, _ in history(uri, tracker.run_id, "train/loss")] == [1, 2]
    assert not making.exists()


def test_an_empty_database_is_made_once_per_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))

    def made(name: str) -> set[str]:
        database = tmp_path / name / "mlflow.db"
        tracker = open_tracker(f"sqlite:///{database}")
        train(tracker, range(1, 3))
        assert tracker.close("FINISHED") == 0
        places = [place for (place,) in execute(database, "SELECT artifact_location FROM experiments")]
        assert len(places) == 2 and not any("first" in place for place in places if name != "first")
        return tables_of(database)

    tables = made("first")
    marked(tmp_path / "cache", empty="runs")
    assert made("second") == tables | {MARK}


def test_failing_database_logs_no_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = open_client(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.create_run(client.create_experiment("e")).info.run_id
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("DROP TABLE metrics")
    with pytest.raises(MlflowException, match="no such table: metrics"):
        client.log_metric(run, "loss", 1.0)
    assert not [record for record in caplog.records if record.exc_info], "MLflow's traceback of hundreds of lines"


def test_unsupported_address_is_refused() -> None:
    with pytest.raises(ServiceError, match="MLFLOW_TRACKING_URI=foo://x is not of a kind that MLflow supports"):
        open_client("foo://x")
