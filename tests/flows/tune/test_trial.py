"""Do trials share rows that are equal, and is one that was killed when it was to end early left as one that has ended early?"""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlflow.tracking import MlflowClient

from penstock.errors import SpecError
from penstock.flows.run.reporter import ConsoleReporter
from penstock.flows.spec_file import LoadedSpec, load_spec
from penstock.flows.tune.space import load_trial
from penstock.flows.tune.sweep import Sweep
from penstock.flows.tune.trial import _TrialReporter, _with_rows, perform_trial
from penstock.ingest.ray_tasks import local_map
from penstock.machine.stopping import StopRequest
from penstock.tasks import prepare
from penstock.tasks.context import RunContext
from penstock.tasks.records.keys import stage_keys
from penstock.tasks.records.ledger import Ledger
from penstock.tasks.tune.record import Report, load_trials
from penstock.training.checkpoint.store import CheckpointStore
from tests.drills.project import make_project
from tests.drills.without_servers import leave_out_servers


def killed(*_: Any, **__: Any) -> None:
    """Stand in for what a killed process does not reach."""
    raise KeyboardInterrupt


class Unheard:
    """A tracker that takes everything."""

    run_id = "parent"

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: None


def context_of(loaded: LoadedSpec, state_dir: Path) -> RunContext:
    """An attempt at the sweep's own run."""
    project = loaded.project
    ledger = Ledger(project.storage)
    run = ledger.new_run("drill", {})
    return RunContext(
        project=project,
        keys=stage_keys(project, ledger.stage_output),
        ledger=ledger,
        run=run,
        attempt=ledger.new_attempt(run.run),
        tracker=cast("Any", Unheard()),
        reporter=ConsoleReporter(),
        state_dir=state_dir,
        need_ray=lambda: True,
        stopping=StopRequest(),
    )


def test_trial_killed_while_stopping_early_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_servers(monkeypatch)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    file = make_project(tmp_path / "p", files=1)
    file.write_text(file.read_text() + "tune: {space: {train.learning_rate: {range: [0.0, 1.0]}}}\n")
    loaded = load_spec(file)
    assert loaded.spec.tune is not None
    sweep = Sweep(loaded, loaded.spec.tune, context_of(loaded, tmp_path))
    ledger, begun = sweep.ctx.ledger, sweep.begin()
    assert begun is not None and begun.run is not None
    ledger.save_run(ledger.new_run("drill", {}).model_copy(update={"run": begun.run}))
    ledger.new_attempt(begun.run)  # of the process that was killed
    reports = [Report(step=5, value=0.5), Report(step=10, value=0.75)]
    sweep.update(1, reports=reports, note="stopped early by asha")
    ended = perform_trial(sweep, sweep.trials[0], StopRequest())

    (closed,) = load_trials(ledger.storage, sweep.ctx.run.run)
    left = ledger.load_run(begun.run)
    assert left is not None and left.status == "partial"
    tracked = left.tracking_runs["mlflow"]
    assert closed == ended and (closed.state, closed.value, closed.step) == ("stopped", 0.5, 10)
    assert [attempt.status for attempt in ledger.attempts(begun.run)] == ["killed", "partial"]
    assert not CheckpointStore(ledger.run_storage(begun.run)).committed(), "it is not trained"
    shown = MlflowClient(uri).get_run(tracked)
    assert shown.info.status == "FINISHED" and shown.data.tags["penstock.trial.state"] == "stopped early"
    assert "stopped early by asha" in shown.data.tags["mlflow.note.content"]


def test_trial_stopped_at_its_last_step_stays_so_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_servers(monkeypatch)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    file = make_project(tmp_path / "p", files=1, epochs=1)
    file.write_text(file.read_text() + "tune: {space: {train.learning_rate: {range: [0.0, 1.0]}}}\n")
    loaded = load_spec(file)
    assert loaded.spec.tune is not None
    sweep = Sweep(loaded, loaded.spec.tune, context_of(loaded, tmp_path))
    begun = sweep.begin()
    assert begun is not None and begun.run is not None
    sweep.live[1] = StopRequest()
    with monkeypatch.context() as patch:
        patch.setattr(sweep._pruner, "report", lambda *_: True)
        patch.setattr("penstock.flows.tune.trial.close_attempt", killed)
        with pytest.raises(KeyboardInterrupt):
            perform_trial(sweep, begun, StopRequest())
    again = Sweep(loaded, loaded.spec.tune, sweep.ctx)
    assert again.trials[0].state == "running" and again.trials[0].note
    assert CheckpointStore(sweep.ctx.ledger.run_storage(begun.run)).committed(), "its training has come to the end"
    ended = perform_trial(again, again.trials[0], StopRequest())
    assert (ended.state, ended.value) == ("stopped", ended.reports[0].value)


def test_first_validation_without_the_metric_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_servers(monkeypatch)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    file = make_project(tmp_path / "p", files=1, epochs=1)
    file.write_text(file.read_text() + "tune: {metric: val/mine, space: {train.learning_rate: {range: [0.0, 1.0]}}}\n")
    loaded = load_spec(file)
    assert loaded.spec.tune is not None
    sweep = Sweep(loaded, loaded.spec.tune, context_of(loaded, tmp_path))
    begun = sweep.begin()
    assert begun is not None and begun.run is not None
    stopping = sweep.live[1] = StopRequest()
    with pytest.raises(SpecError, match=r"tune\.metric is 'val/mine', which validation does not measure") as ended:
        perform_trial(sweep, begun, StopRequest())
    assert ended.value.next_step == "choose one of val/accuracy, val/f1, val/loss"
    assert stopping.stop.is_set(), "at the first validation"
    assert [attempt.status for attempt in sweep.ctx.ledger.attempts(begun.run)] == ["failed"]
    assert sweep.trials[0].state == "running", "the next command finds the sweep as it was"


def test_equal_rows_are_prepared_once_for_all_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunContext, "parallel", lambda _ctx, _stage: local_map)
    prepares, keys_made = prepare.materialize_dataset, list[str]()

    def counted(*arguments: Any, **more: Any) -> Any:
        keys_made.append(more["key"])
        return prepares(*arguments, **more)

    monkeypatch.setattr(prepare, "materialize_dataset", counted)
    loaded = load_spec(make_project(tmp_path / "p", files=1))
    sweep = cast("Sweep", SimpleNamespace(ctx=context_of(loaded, tmp_path), prepared={}, preparing=threading.Lock()))

    def rows(**values: Any) -> RunContext:
        spec = load_trial(loaded, {key.replace("__", "."): value for key, value in values.items()})
        return _with_rows(sweep, spec.project, cast("Any", ConsoleReporter()))

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
    sweep: Any = SimpleNamespace(line=lambda number, text: told.append(f"trial {number}{text}"))
    reporter = _TrialReporter(sweep, 3)
    reporter.report("train: rank 1: hello")
    reporter.report("drill: run r, attempt 1")
    reporter.warn("train: a worker was lost")
    assert told == ["trial 3: train: rank 1: hello", "trial 3: train: a worker was lost"]
