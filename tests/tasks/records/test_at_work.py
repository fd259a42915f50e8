"""Several runs of a pipeline at a time: one process chooses, each run has a lease, and the same training is refused."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock import lease as lease_module
from penstock.errors import LeaseHeldError, ServiceError
from penstock.flows.run.decisions import Continue, NewRun, Refuse, avoid_busy_run, others_at_work, refuse_same_training
from penstock.lease import LeaseHolder, current_holder, hold_lease, last_heartbeat
from penstock.storage import Storage
from penstock.tasks.records.at_work import choosing_a_run, holders_of_runs
from penstock.tasks.records.keys import StageKey
from penstock.tasks.records.ledger import Ledger, Run, lease_of, lease_path
from tests.penstock.test_lease import holder_process


def keys(epochs: int, rows: str | None = "1") -> dict[str, StageKey]:
    """Of a training, whose rows may not be prepared yet."""
    inputs = {"train.epochs": epochs} | ({"rows.train": rows} if rows is not None else {})
    key = f"{epochs}-{rows}" if rows is not None else ""
    read = StageKey(stage="read", key="r", inputs={"files": {"train/a.csv": "1"}})
    return {"read": read, "train": StageKey(stage="train", key=key, inputs=inputs)}


def recorded(ledger: Ledger, name: str, epochs: int, rows: str | None = "1") -> Run:
    run = Run(run=name, pipeline="p", created="2026-01-01T00:00:00+00:00", spec={}, keys=keys(epochs, rows))
    ledger.save_run(run)
    ledger.make_current(run)
    return run


@pytest.mark.parametrize("rows", ["1", None])
def test_other_training_starts_beside_run_same_is_refused(tmp_path: Path, rows: str | None) -> None:
    ledger = Ledger(Storage(str(tmp_path)))
    first, second = recorded(ledger, "a", 3, rows), recorded(ledger, "b", 5, rows)
    with hold_lease(ledger.storage, lease_of(first)), hold_lease(ledger.storage, lease_of(second)):
        for asked in (3, 5):  # the one that is not the newest, too
            with pytest.raises(LeaseHeldError, match=f"pid {os.getpid()} on"):
                refuse_same_training(ledger, others_at_work(ledger, "p", keys(asked, rows)))
        others = others_at_work(ledger, "p", keys(7, rows))
        assert others == {"a": ["train.epochs: 3 -> 7"], "b": ["train.epochs: 5 -> 7"]}
        refuse_same_training(ledger, others)
        for decision in (Continue(second), Refuse(second, ("train.epochs",))):
            assert avoid_busy_run(decision, others) == NewRun("another process works on run b, where train.epochs: 5 -> 7")
    assert others_at_work(ledger, "p", keys(7, rows)) == {}
    assert avoid_busy_run(Continue(second), {}) == Continue(second)


def test_choosing_waits_and_reports_the_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "SILENCE_S", 0.0)
    storage, told, chosen = Storage(str(tmp_path)), threading.Event(), threading.Event()

    def choose() -> None:
        with choosing_a_run(storage, "p", on_wait=lambda _holder: told.set()):
            chosen.set()

    with choosing_a_run(storage, "p"):
        waiting = threading.Thread(target=choose)
        waiting.start()
        assert told.wait(60) and not chosen.is_set()
    waiting.join(30)
    assert chosen.is_set()


def test_choosing_removes_dead_leases_only(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    leases = {name: lease_of(Run(run=name, pipeline="p", created="", spec={})) for name in ("ended", "killed", "works")}
    with hold_lease(storage, leases["ended"]):
        pass
    killed, works = (holder_process(tmp_path, leases[name]) for name in ("killed", "works"))
    try:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert [*holders_of_runs(storage, "p")] == ["works"]
        (record,) = storage.list(leases["killed"])
        holder = LeaseHolder.model_validate(storage.read_json(f"{leases['killed']}/{record}"))
        with choosing_a_run(storage, "p"):
            assert storage.list("pipelines/p/leases") == ["works"]
        assert last_heartbeat(storage, leases["killed"], holder.process) == holder.heartbeat, (
            "which the record of its end needs"
        )
    finally:
        works.communicate(input="")


def test_own_unreleased_lease_does_not_block(tmp_path: Path) -> None:
    class Cut(Storage):
        cut = False

        def write_bytes(self, path: str, data: bytes) -> None:
            if self.cut:
                raise OSError("away")
            super().write_bytes(path, data)

    storage = Cut(str(tmp_path))
    with contextlib.suppress(ValueError), choosing_a_run(storage, "p"):
        storage.cut = True
        raise ValueError
    assert current_holder(Storage(str(tmp_path)), lease_path("p")) is None
    with choosing_a_run(Storage(str(tmp_path)), "p"):
        pass


def test_undeletable_lease_does_not_block_choosing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Undeletable(Storage):
        refused = 0

        def delete(self, path: str) -> None:
            self.refused += 1
            raise ServiceError("503")

        def delete_files(self, paths: Sequence[str]) -> None:
            self.delete(paths[0])

    monkeypatch.setattr(lease_module, "OLD_GENERATIONS", 1)
    storage = Undeletable(str(tmp_path))
    left = lease_of(Run(run="ended", pipeline="p", created="", spec={}))
    for _ in range(3):
        with hold_lease(storage, left):
            pass
    assert storage.refused > 0, "of the lease"
    storage.refused = 0
    with choosing_a_run(storage, "p") as at_work:
        assert storage.refused == 1 and storage.list("pipelines/p/leases") == at_work == ["ended"]
    with choosing_a_run(Storage(str(tmp_path)), "p"):
        assert Storage(str(tmp_path)).list("pipelines/p/leases") == []
