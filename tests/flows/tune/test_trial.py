"""Do trials share rows that are equal, and is one that was killed when it was to end early left as one that has ended early?"""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlflow.tracking import MlflowClient

from penstock.flows.run.reporter import PlainReporter
from penstock.flows.spec_file import load_spec
from penstock.flows.tune.space import load_trial
from penstock.flows.tune.sweep import Sweep
from penstock.flows.tune.trial import _TrialReporter, _with_rows, close_stopped
from penstock.ingest.ray_tasks import local_map
from penstock.machine.stopping import StopRequest
from penstock.storage import Storage
from penstock.tasks import prepare
from penstock.tasks.context import RunContext
from penstock.tasks.records.keys import stage_keys
from penstock.tasks.records.ledger import Ledger
from penstock.tasks.tune.record import Report, Trial, load_trials, save_trial
from penstock.tasks.tune.spec import TuneSpec
from tests.drills.project import make_project


def test_trial_killed_while_stopping_early_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    client = MlflowClient(uri)
    tracked = client.create_run(client.create_experiment("drill", tmp_path.as_uri())).info.run_id
    ledger = Ledger(Storage(str(tmp_path / "state")))
    run = ledger.new_run("drill", {}).model_copy(update={"tracking_runs": {"mlflow": tracked}})
    ledger.save_run(run)
    ledger.new_attempt(run.run)

    cut = Trial(number=1, values={"train.learning_rate": 0.1}, run=run.run, note="stopped early by asha")
    reports = [Report(step=5, value=0.5), Report(step=10, value=0.75)]
    save_trial(ledger.storage, "sweep", cut.model_copy(update={"reports": reports}))
    context: Any = SimpleNamespace(
        ledger=ledger,
        storage=ledger.storage,
        state_dir=tmp_path / "state",
        run=SimpleNamespace(run="sweep"),
        stopping=StopRequest(),
    )
    section = TuneSpec.model_validate({"space": {"train.learning_rate": {"range": [0.0, 1.0]}}})
    close_stopped(Sweep(cast("Any", None), section, context), cut)

    (closed,) = load_trials(ledger.storage, "sweep")
    assert (closed.state, closed.tracked_run, closed.value, closed.step) == ("stopped", tracked, 0.5, 10)
    left = ledger.load_run(run.run)
    assert left is not None and left.status == "partial"
    assert [attempt.status for attempt in ledger.attempts(run.run)] == ["killed"]
    shown = client.get_run(tracked)
    assert shown.info.status == "FINISHED" and shown.data.tags["penstock.trial.state"] == "stopped early"
    assert shown.data.tags["mlflow.note.content"].endswith("stopped early by asha")


class Unheard:
    """A tracker that takes everything."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: None


def test_equal_rows_are_prepared_once_for_all_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunContext, "parallel", lambda _ctx, _stage: local_map)
    prepares, keys_made = prepare.materialize_dataset, list[str]()

    def counted(*arguments: Any, **more: Any) -> Any:
        keys_made.append(more["key"])
        return prepares(*arguments, **more)

    monkeypatch.setattr(prepare, "materialize_dataset", counted)
    loaded = load_spec(make_project(tmp_path / "p", files=1))
    project = loaded.project
    ledger = Ledger(project.storage)
    run = ledger.new_run("drill", {})
    ctx = RunContext(
        project=project,
        keys=stage_keys(project, ledger.stage_output),
        ledger=ledger,
        run=run,
        attempt=ledger.new_attempt(run.run),
        tracker=cast("Any", Unheard()),
        reporter=PlainReporter(),
        state_dir=tmp_path,
        need_ray=lambda: True,
        stopping=StopRequest(),
    )
    sweep = cast("Sweep", SimpleNamespace(ctx=ctx, prepared={}, preparing=threading.Lock()))

    def rows(**values: Any) -> RunContext:
        spec = load_trial(loaded, {key.replace("__", "."): value for key, value in values.items()})
        return _with_rows(sweep, spec.project, cast("Any", PlainReporter()))

    whole = rows(train__learning_rate=0.1)
    assert rows(train__learning_rate=0.2) is whole
    fewer = rows(data__validation__fraction=0.5, train__learning_rate=0.1)
    assert rows(data__validation__fraction=0.5, train__learning_rate=0.2) is fewer
    assert whole.manifest.rows["train"] > fewer.manifest.rows["train"]
    other_order = rows(shuffle__seed=6)
    assert other_order is not whole and other_order.outcomes["materialize"].outcome == "reused"
    assert keys_made == [whole.manifest.key, fewer.manifest.key]


def test_lines_of_a_trial_carry_its_number() -> None:
    told: list[str] = []
    sweep: Any = SimpleNamespace(shared_lines={"on CPUs"}, line=lambda number, text: told.append(f"trial {number}{text}"))
    reporter = _TrialReporter(sweep, 3)
    reporter.report("train: rank 1: hello")
    reporter.report("train: on CPUs")
    reporter.report("drill: run r, attempt 1")
    reporter.warn("train: a worker was lost")
    assert told == ["trial 3: train: rank 1: hello", "trial 3: train: a worker was lost"]
