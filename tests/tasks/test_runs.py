"""The ledger: records survive, damaged ones count as absent, and a vanished process is recognised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from penstock.storage import Storage
from tasks.runs import Attempt, Ledger, StageRecord


def test_a_run_is_found_again_and_attempts_are_numbered(tmp_path: Path) -> None:
    ledger = Ledger(Storage(str(tmp_path)))
    assert ledger.current_run("p") is None
    run = ledger.new_run("p", {"name": "p"})
    ledger.save_run(run)
    ledger.make_current(run)
    assert ledger.current_run("p") == run
    assert [ledger.new_attempt(run.run).number for _ in range(3)] == [1, 2, 3]
    assert [a.number for a in ledger.attempts(run.run)] == [1, 2, 3]
    assert list(ledger.runs()) == [run]


def test_a_torn_record_counts_as_absent(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    ledger = Ledger(storage)
    record = StageRecord(stage="read", key="k", inputs={}, output={"rows": 3}, seconds=0.1, made="2026")
    ledger.save_stage("stages/read/k.json", record)
    assert ledger.stage_record("stages/read/k.json", "k") == record
    assert ledger.stage_record("stages/read/k.json", "other") is None
    whole = storage.read_bytes("stages/read/k.json")
    storage.write_bytes("stages/read/k.json", whole[: len(whole) // 2])
    assert ledger.stage_record("stages/read/k.json", "k") is None


def test_an_attempt_whose_process_is_gone_has_vanished(tmp_path: Path) -> None:
    ledger = Ledger(Storage(str(tmp_path)))
    own = ledger.new_attempt("r")
    assert own.pid == os.getpid()
    assert not own.vanished
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    theirs = own.model_copy(update={"pid": child.pid, "process_started": psutil.Process(child.pid).create_time()})
    assert not theirs.vanished
    child.kill()
    child.wait()
    assert theirs.vanished
    assert not theirs.model_copy(update={"status": "done"}).vanished


def test_a_process_with_a_reused_pid_is_another_one() -> None:
    long_ago = Attempt(number=1, host=os.uname().nodename, pid=os.getpid(), process_started=1.0, started="2026")
    assert long_ago.vanished
