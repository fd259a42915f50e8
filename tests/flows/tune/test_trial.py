"""Is a trial that was killed when it was to end early left as one that has ended early?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlflow.tracking import MlflowClient

from penstock.flows.tune.trial import Sweep, close_stopped
from penstock.storage import Storage
from penstock.tasks.records.ledger import Ledger
from penstock.tasks.tune.record import Trial


def test_a_killed_trial_that_was_to_end_early_has_ended_early_on_every_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    client = MlflowClient(uri)
    tracked = client.create_run(client.create_experiment("drill", tmp_path.as_uri())).info.run_id
    ledger = Ledger(Storage(str(tmp_path / "state")))
    run = ledger.new_run("drill", {}).model_copy(update={"tracking_runs": {"mlflow": tracked}})
    ledger.save_run(run)
    ledger.new_attempt(run.run)

    context: Any = SimpleNamespace(ledger=ledger, state_dir=tmp_path / "state", run=SimpleNamespace(run="sweep"))
    trial = Trial(number=2, values={"train.learning_rate": 0.1}, run=run.run, state="stopped", note="stopped early by asha")
    closed = close_stopped(cast("Sweep", SimpleNamespace(ctx=context)), trial)

    assert (closed.state, closed.tracked_run) == ("stopped", tracked)
    left = ledger.load_run(run.run)
    assert left is not None and left.status == "partial"
    assert [attempt.status for attempt in ledger.attempts(run.run)] == ["killed"]
    shown = client.get_run(tracked)
    assert shown.info.status == "FINISHED" and shown.data.tags["penstock.trial.state"] == "stopped early"
    assert shown.data.tags["mlflow.note.content"].endswith("stopped early by asha")
