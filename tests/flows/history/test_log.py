"""What the log has of attempts and their models; what its verbs refuse. Runs of real commands: tests/runs/test_history.py."""

from __future__ import annotations

import datetime as dt
import io
from pathlib import Path

import pytest

from penstock.errors import DataError, SpecError
from penstock.flows.answer import LineConsole
from penstock.flows.history.log import collect_log, show_log
from penstock.flows.history.which_run import RunNames
from penstock.flows.run.repair import close_attempts
from penstock.flows.spec_file import load_spec
from penstock.lease import LeaseHolder
from penstock.machine.process import ProcessIdentity
from penstock.storage import Storage
from penstock.tasks.records.at_work import choosing_a_run
from penstock.tasks.records.ledger import Ledger, lease_of
from tests.drills.project import make_project


def test_log_names_older_version_with_its_attempt(tmp_path: Path) -> None:
    file = make_project(tmp_path / "p", files=1)
    ledger = Ledger(Storage(load_spec(file).spec.storage))
    run = ledger.new_run("drill", {})
    stages = [{"name": "read", "key": "k", "outcome": "ran", "seconds": 1.0}]
    for version in ("models:/drill/1", "models:/drill/2"):
        attempt = ledger.new_attempt(run.run).model_copy(update={"status": "done", "model_uri": version, "stages": stages})
        ledger.save_attempt(run.run, attempt)
    ledger.save_run(run.model_copy(update={"status": "done", "result": {"attempt": 2, "model_uri": "models:/drill/2"}}))
    assert RunNames(file).find("2").run == RunNames(file).find("models:/drill/2").run == run.run
    for name in ("1", "v1", "models:/drill/1"):
        with pytest.raises(SpecError, match=r"^models:/drill/1 is of attempt 1 of .* now those of models:/drill/2") as refused:
            RunNames(file).find(name)
        assert run.run in refused.value.next_step
    with pytest.raises(SpecError, match="there is no run '3'"):
        RunNames(file).find("3")
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


@pytest.mark.parametrize("beats", [True, False])
def test_killed_attempt_took_until_its_last_heartbeat(tmp_path: Path, beats: bool) -> None:
    file = make_project(tmp_path / "p", files=1)
    ledger = Ledger(Storage(load_spec(file).spec.storage))
    run = ledger.new_run("drill", {})
    ledger.save_run(run)
    gone = ProcessIdentity.current().model_copy(update={"started": 0.0})
    began = "2026-01-01T00:00:00+00:00"
    ledger.save_attempt(run.run, ledger.new_attempt(run.run).model_copy(update={"process": gone, "started": began}))
    if beats:
        beat = dt.datetime.fromisoformat(began).timestamp() + 16
        holder = LeaseHolder(owner="o", process=gone, heartbeat=beat)
        ledger.storage.write_json(f"{lease_of(run)}/00000001.json", holder.model_dump(mode="json"))

    def logged() -> list[tuple[str, str]]:
        return [(entry["outcome"], entry["took"]) for entry in collect_log(file)["attempts"]]

    assert logged() == [("killed", "0:00:16" if beats else "")], "before a command repairs it"
    with choosing_a_run(ledger.storage, "drill"):  # it deletes the lease
        assert close_attempts(ledger, run, ledger.attempts(run.run)) == "killed"
    assert logged() == [("killed", "0:00:16" if beats else "")]
    assert ledger.attempts(run.run)[0].status == "killed"


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
