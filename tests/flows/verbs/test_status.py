"""What the status says of runs whose processes are gone; runs of real commands are looked at where those are."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from penstock.flows.run.repair import repair_run
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.status import collect_status, show_status
from penstock.storage import Storage
from penstock.tasks.ledger import Ledger
from tests.drills.project import make_project


@pytest.mark.parametrize("began", [True, False])
def test_a_finished_run_whose_continuation_was_killed_says_which_attempt_ended_how(tmp_path: Path, began: bool) -> None:
    file = make_project(tmp_path / "p", files=1)
    ledger = Ledger(Storage(load_spec(file).spec.storage))
    run = ledger.new_run("drill", {})
    first = ledger.new_attempt(run.run)
    result = {"attempt": 1, "exactness": "bit-exact", "model_uri": "models:/drill/1"}
    ledger.save_run(run.model_copy(update={"status": "done", "done_key": "k", "result": result}))
    ledger.save_attempt(run.run, first.model_copy(update={"status": "done"}))
    # The second attempt's record comes first, so SIGKILL may come before the run's says that it is running again.
    ledger.new_attempt(run.run)
    left = ledger.load_run(run.run)
    assert left is not None
    if began:
        left = left.model_copy(update={"status": "running"})
        ledger.save_run(left)
    assert repair_run(ledger, left, tmp_path)

    found = collect_status(file)
    (described,) = found["runs"]
    assert described["status"] == "killed"
    assert [attempt["status"] for attempt in described["attempts"]] == ["done", "killed"]
    said = io.StringIO()
    show_status(found, Console(file=said, width=200))
    assert said.getvalue() == f"{run.run}  killed  in attempt 2, done in attempt 1  bit-exact  models:/drill/1\n"


def test_a_run_whose_tracker_is_no_longer_installed_is_closed_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(Storage(str(tmp_path)))
    run = ledger.new_run("drill", {"tracking": {"tracker": "lines"}}).model_copy(update={"tracking_runs": {"lines": "1"}})
    ledger.save_run(run)
    ledger.new_attempt(run.run)
    assert repair_run(ledger, run, tmp_path)
    left = ledger.load_run(run.run)
    assert left is not None and left.status == "killed"
    assert "there is no tracker 'lines'" in caplog.text
