"""What the status says of runs whose processes are gone; runs of real commands are looked at where those are."""

from __future__ import annotations

import io
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from penstock.errors import DataError
from penstock.flows.answer import LineConsole
from penstock.flows.run.repair import close_attempts, repair_run
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.status import _describe, collect_status, show_status
from penstock.storage import Storage
from penstock.tasks.prefect_away import prefect_answers
from penstock.tasks.records.ledger import Ledger
from tests.drills.project import make_project


@pytest.mark.parametrize("began", [True, False])
@pytest.mark.parametrize("trained", [None, "same-order: optimizer (lr)"])
def test_status_names_killed_attempt_of_finished_run(tmp_path: Path, began: bool, trained: str | None) -> None:
    file = make_project(tmp_path / "p", files=1)
    ledger = Ledger(Storage(load_spec(file).spec.storage))
    run = ledger.new_run("drill", {})
    first = ledger.new_attempt(run.run)
    result = {"attempt": 1, "exactness": "bit-exact", "model_uri": "models:/drill/1"}
    ledger.save_run(run.model_copy(update={"status": "done", "done_key": "k", "result": result}))
    ledger.save_attempt(run.run, first.model_copy(update={"status": "done", "exactness": "bit-exact"}))
    # The second attempt's record comes first, so SIGKILL may come before the run's says that it is running again.
    ledger.save_attempt(run.run, ledger.new_attempt(run.run).model_copy(update={"exactness": trained}))
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
    show_status(found, LineConsole(file=said, width=200))
    assert said.getvalue() == f"{run.run}  killed  2 attempts  {trained or 'bit-exact'}  models:/drill/1\n"


def test_status_lists_a_run_that_was_replaced(tmp_path: Path) -> None:
    file = make_project(tmp_path / "p", files=1)
    ledger = Ledger(Storage(load_spec(file).spec.storage))
    empty = ledger.new_run("drill", {})
    later = ledger.new_run("drill", {}, empty)
    for run in (empty, later):
        ledger.save_run(run.model_copy(update={"status": "partial"}))
    said = io.StringIO()
    show_status(collect_status(file), LineConsole(file=said, width=200))
    assert said.getvalue().splitlines() == [f"{run.run}  partial  0 attempts" for run in (empty, later)]


def test_failed_run_shows_error_and_next_step(tmp_path: Path) -> None:
    ledger = Ledger(Storage(str(tmp_path)))
    run = ledger.new_run("drill", {}).model_copy(update={"status": "failed"})
    problems = [f"night4.csv: line {line} has 8 instead of 15 fields" for line in range(46, 56)]
    error = DataError("1 of 4 source files cannot be used", problems=problems, next_step="repair the lines")
    failed = ledger.new_attempt(run.run).model_copy(update={"status": "failed", "error": str(error)})
    ledger.save_run(run)
    ledger.save_attempt(run.run, failed)
    said = io.StringIO()
    described = _describe(ledger, run, None)
    show_status({"storage": "s", "runs": [described], "repaired": []}, LineConsole(file=said, width=80))
    assert said.getvalue().splitlines() == [
        f"{run.run}  failed  1 attempt",
        "    1 of 4 source files cannot be used",
        *(f"      - {problem}" for problem in problems[:3]),
        "    ... and 7 more",
        "    Next: repair the lines",
    ]


def test_missed_end_stays_recorded_while_prefect_is_away(tmp_path: Path) -> None:
    ledger = Ledger(Storage(str(tmp_path)))
    run = ledger.new_run("drill", {}).model_copy(update={"status": "done"})
    ledger.save_run(run)
    attempt = ledger.new_attempt(run.run, str(uuid.uuid4()))
    ledger.save_attempt(run.run, attempt.model_copy(update={"status": "done", "prefect_missed_end": True}))
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert not prefect_answers()
        assert close_attempts(ledger, run, ledger.attempts(run.run)) is None
    assert ledger.attempts(run.run)[0].prefect_missed_end


def test_run_of_missing_tracker_is_closed_with_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(Storage(str(tmp_path)))
    run = ledger.new_run("drill", {"tracking": {"tracker": "lines"}}).model_copy(update={"tracking_runs": {"lines": "1"}})
    ledger.save_run(run)
    ledger.new_attempt(run.run)
    assert repair_run(ledger, run, tmp_path)
    left = ledger.load_run(run.run)
    assert left is not None and left.status == "killed"
    assert "there is no tracker 'lines'" in caplog.text


def test_verbs_of_records_load_no_heavy_library() -> None:
    load = "import sys, penstock.flows.verbs.status, penstock.flows.history.log\n"
    load += "print({'torch', 'ray', 'prefect', 'mlflow'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, timeout=300)
    assert done.stdout == "set()\n", done.stderr
