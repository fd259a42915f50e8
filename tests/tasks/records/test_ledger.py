"""The ledger: records survive, and damaged ones count as absent, but for the one that would bury a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ResumeError
from penstock.flows.run.repair import repair_run
from penstock.storage import Storage
from penstock.tasks.records.keys import StageKey
from penstock.tasks.records.ledger import Ledger, StageRecord


def test_run_is_found_again_and_attempts_are_numbered(tmp_path: Path) -> None:
    ledger = Ledger(Storage(str(tmp_path)))
    assert ledger.current_run("p") is None
    run = ledger.new_run("p", {"name": "p"})
    ledger.save_run(run)
    ledger.make_current(run)
    assert ledger.current_run("p") == run
    assert [ledger.new_attempt(run.run).number for _ in range(3)] == [1, 2, 3]
    assert [a.number for a in ledger.attempts(run.run)] == [1, 2, 3]
    assert list(ledger.runs()) == [run]


def test_run_has_trained_once_workers_began(tmp_path: Path) -> None:
    ledger = Ledger(Storage(str(tmp_path)))
    run = ledger.new_run("p", {"name": "p"})
    ledger.new_attempt(run.run)
    assert not ledger.has_trained(run.run)
    ledger.save_attempt(run.run, ledger.new_attempt(run.run).model_copy(update={"workers": {0: "host:1"}}))
    ledger.new_attempt(run.run)
    assert ledger.has_trained(run.run)


def test_torn_record_counts_as_absent(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    ledger = Ledger(storage)
    record = StageRecord(stage="read", key="k", inputs={}, output={"rows": 3}, seconds=0.1, made="2026")
    ledger.save_stage("stages/read/k.json", record)
    assert ledger.stage_record("stages/read/k.json", "k") == record
    assert ledger.stage_record("stages/read/k.json", "other") is None
    whole = storage.read_bytes("stages/read/k.json")
    storage.write_bytes("stages/read/k.json", whole[: len(whole) // 2])
    assert Ledger(storage).stage_record("stages/read/k.json", "k") is None


@pytest.mark.parametrize("damage", ["run.json is torn", "run.json is gone", "current.json is torn"])
def test_unreadable_current_run_is_refused(tmp_path: Path, damage: str) -> None:
    storage = Storage(str(tmp_path))
    ledger = Ledger(storage)
    run = ledger.new_run("p", {"name": "p"})
    ledger.save_run(run)
    ledger.make_current(run)
    path = "pipelines/p/current.json" if damage.startswith("current") else f"runs/{run.run}/run.json"
    if damage.endswith("gone"):
        storage.delete(path)
    else:
        storage.write_bytes(path, storage.read_bytes(path)[:20])
    with pytest.raises(ResumeError, match="the record of the last run of 'p' cannot be read") as refused:
        ledger.current_run("p")
    assert "--fresh" in refused.value.next_step
    assert ledger.current_run("another") is None


def test_number_of_torn_attempt_is_not_reused(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    ledger = Ledger(storage)
    ledger.new_attempt("r")
    ledger.new_attempt("r")
    storage.write_bytes("runs/r/attempts/0002.json", b"{")
    assert ledger.new_attempt("r").number == 3
    assert [attempt.number for attempt in ledger.attempts("r")] == [1, 3]
    storage.write_bytes("runs/r/attempts/0003.json.bak", b"{}")
    assert ledger.new_attempt("r").number == 4


def test_attempts_are_read_back_to_the_newest_closed_one(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    ledger = Ledger(storage)
    assert ledger.newest_attempts("r", []) == []
    made = [ledger.new_attempt("r") for _ in range(5)]
    missed = {"status": "done", "prefect_missed_end": True}
    for attempt, end in zip(made, ({"status": "done"}, {"status": "done"}, {"status": "killed"}, missed), strict=False):
        ledger.save_attempt("r", attempt.model_copy(update=end))
    numbers = ledger.attempt_numbers("r")
    assert [attempt.number for attempt in ledger.newest_attempts("r", numbers)] == [3, 4, 5]
    storage.write_bytes("runs/r/attempts/0005.json", b"{")
    assert [attempt.number for attempt in ledger.newest_attempts("r", numbers)] == [3, 4]
    assert ledger.new_attempt("r", number=max(numbers) + 1).number == 6


def test_training_of_a_done_run_is_noted_once(tmp_path: Path) -> None:
    ledger = Ledger(Storage(str(tmp_path)))
    train = StageKey(stage="train", key="k", inputs={})
    run = ledger.new_run("p", {}).model_copy(update={"keys": {"train": train}})
    note = tmp_path / "pipelines" / "p" / "trainings" / "k.json"
    ledger.note_training(run)
    note.unlink()
    ledger.note_training(run.model_copy(update={"done_key": "k"}))
    assert not note.exists()
    ledger.note_training(run.model_copy(update={"done_key": "another"}))
    assert note.exists()


def test_done_run_is_not_killed_during_its_last_seconds(tmp_path: Path) -> None:
    ledger = Ledger(Storage(str(tmp_path)))
    run = ledger.new_run("p", {})
    ledger.new_attempt(run.run)
    ledger.save_run(run.model_copy(update={"status": "done", "done_key": "k", "result": {"attempt": 1}}))
    assert repair_run(ledger, ledger.load_run(run.run) or run, "")
    assert [attempt.status for attempt in ledger.attempts(run.run)] == ["done"]
    unfinished = ledger.new_run("q", {})
    ledger.new_attempt(unfinished.run)
    ledger.save_run(unfinished)
    assert repair_run(ledger, unfinished, "") and not repair_run(ledger, unfinished, "")
    statuses = {found.pipeline: (found.status, found.done_key) for found in ledger.runs()}
    assert statuses == {"p": ("done", "k"), "q": ("killed", None)}


def test_run_after_another_is_the_later_one_on_any_clock(tmp_path: Path) -> None:
    ledger = Ledger(Storage(str(tmp_path)))
    first = ledger.new_run("p", {}).model_copy(update={"created": "2999-01-01T00:00:00+00:00"})
    second = ledger.new_run("p", {}, first)
    for run in (first, second):
        ledger.save_run(run)
    assert [run.run for run in ledger.runs()] == [first.run, second.run]
    assert second.created == "2999-01-01T00:00:01+00:00"
