"""What the status says of runs whose processes are gone; runs of real commands are looked at where those are."""

from __future__ import annotations

import io
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from penstock.errors import DataError, SpecError
from penstock.flows.answer import LineConsole
from penstock.flows.run.repair import close_attempts, repair_run
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.log import collect_log, show_log
from penstock.flows.verbs.status import _describe, collect_status, show_status
from penstock.flows.verbs.which_run import RunNames
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
    assert said.getvalue() == f"{run.run}  killed  in attempt 2, done in attempt 1  {trained or 'bit-exact'}  models:/drill/1\n"


def test_status_leaves_out_empty_run_that_was_replaced(tmp_path: Path) -> None:
    file = make_project(tmp_path / "p", files=1)
    ledger = Ledger(Storage(load_spec(file).spec.storage))
    empty = ledger.new_run("drill", {})
    later = ledger.new_run("drill", {}, empty)
    for run in (empty, later):
        ledger.save_run(run.model_copy(update={"status": "partial"}))
    said = io.StringIO()
    show_status(collect_status(file), LineConsole(file=said, width=200))
    assert said.getvalue().splitlines() == [
        f"{later.run}  partial  0 attempts",
        "not listed: 1 run that ended before training, as later ones have gone on; see --json",
    ]


def test_status_names_older_version_with_its_attempt(tmp_path: Path) -> None:
    file = make_project(tmp_path / "p", files=1)
    ledger = Ledger(Storage(load_spec(file).spec.storage))
    run = ledger.new_run("drill", {})
    stages = [{"name": "read", "key": "k", "outcome": "ran", "seconds": 1.0}]
    for version in ("models:/drill/1", "models:/drill/2"):
        attempt = ledger.new_attempt(run.run).model_copy(update={"status": "done", "model_uri": version, "stages": stages})
        ledger.save_attempt(run.run, attempt)
    ledger.save_run(run.model_copy(update={"status": "done", "result": {"model_uri": "models:/drill/2"}}))
    assert RunNames(file).find("2").run == RunNames(file).find("models:/drill/2").run == run.run
    for name in ("1", "v1", "models:/drill/1", "3"):  # version 1 is of an attempt, and its run has another by now
        with pytest.raises(SpecError, match=f"there is no run '{name}'"):
            RunNames(file).find(name)
    assert [entry["model_uri"] for entry in collect_log(file)["attempts"]] == ["models:/drill/1", "models:/drill/2"]


def test_log_names_a_model_at_the_attempt_that_registered_it(tmp_path: Path) -> None:
    file = make_project(tmp_path / "p", files=1)
    ledger = Ledger(Storage(load_spec(file).spec.storage))
    run = ledger.new_run("drill", {})
    ledger.save_run(run)
    for version in ("models:/drill/1", None):
        attempt = ledger.new_attempt(run.run)
        ledger.save_attempt(run.run, attempt.model_copy(update={"status": "done", "model_uri": version}))
    assert [entry["model_uri"] for entry in collect_log(file)["attempts"]] == ["models:/drill/1", None]


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
    show_status({"storage": "s", "runs": [described], "repaired": [], "reported": []}, LineConsole(file=said, width=80))
    assert said.getvalue().splitlines() == [
        f"{run.run}  failed  1 attempt",
        "    1 of 4 source files cannot be used",
        *(f"      - {problem}" for problem in problems[:3]),
        "      - and 7 more",
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
        assert close_attempts(ledger, run) is None
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
    load = "import sys, penstock.flows.verbs.status, penstock.flows.verbs.log\n"
    load += "print({'torch', 'ray', 'prefect', 'mlflow'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, timeout=300)
    assert done.stdout == "set()\n", done.stderr


def test_log_shows_error_and_next_step(tmp_path: Path) -> None:
    file = make_project(tmp_path / "p", files=1)
    ledger = Ledger(Storage(load_spec(file).spec.storage))
    run = ledger.new_run("drill", {})
    error = DataError("rows.csv: 3 rows have a null in age", problems=["first: row 7"], next_step="fill it")
    ended = {"status": "failed", "ended": "2026-01-01T00:01:00+00:00", "started": "2026-01-01T00:00:00+00:00"}
    ledger.save_attempt(run.run, ledger.new_attempt(run.run).model_copy(update={**ended, "error": str(error.with_next_step())}))
    ledger.save_run(run.model_copy(update={"status": "failed"}))
    log = collect_log(file)
    said = io.StringIO()
    show_log(log, LineConsole(file=said, width=40))
    assert said.getvalue().splitlines() == [
        f"2026-01-01 00:00  {run.run}  attempt 1  failed  0:01:00",
        "    rows.csv: 3 rows have a null in age",
        "      - first: row 7",
        "    Next: fill it",
    ]
