"""One owner at a time: living holders are respected, dead ones replaced, with real processes."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import pytest

from penstock import lease as lease_module
from penstock.errors import LeaseHeldError, ServiceError
from penstock.lease import current_holder, hold_lease, refuse_if_held
from penstock.storage import Storage
from tests import ROOT
from tests.runs.faulty_front import faulty_front
from tests.servers.swift import SwiftServer

HOLD = """
import sys
from penstock.lease import hold_lease
from penstock.storage import Storage
with hold_lease(Storage(sys.argv[1]), sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder_process(root: Path | str, path: str = "lease") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root), path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "held"
    return process


def test_held_lease_refuses_second_process_and_names_holder(tmp_path: Path) -> None:
    process = holder_process(tmp_path)
    try:
        with (
            pytest.raises(LeaseHeldError, match=f"pid {process.pid} on ") as caught,
            hold_lease(Storage(str(tmp_path)), "lease"),
        ):
            pass
        assert caught.value.exit_code == 6
    finally:
        process.communicate(input="")


def test_holder_in_a_container_of_this_name_is_not_named_by_pid(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    with hold_lease(storage, "lease") as holder:
        elsewhere = holder.model_copy(update={"process": holder.process.model_copy(update={"machine": "another", "pid": 1})})
        storage.write_bytes("lease/00000001.json", elsewhere.model_dump_json().encode())
        with pytest.raises(LeaseHeldError) as refused:
            refuse_if_held(storage, "lease")
    assert "stop its container; the place of a dead holder is free 60 s after" in refused.value.next_step
    assert "kill 1" not in refused.value.next_step


def test_released_lease_is_free(tmp_path: Path) -> None:
    process = holder_process(tmp_path)
    process.communicate(input="")
    storage = Storage(str(tmp_path))
    assert current_holder(storage, "lease") is None
    with hold_lease(storage, "lease") as holder:
        assert current_holder(storage, "lease") == holder


def test_brief_holder_is_waited_for_without_a_message(tmp_path: Path) -> None:
    storage, got = Storage(str(tmp_path)), threading.Event()

    def take() -> None:
        with hold_lease(storage, "lease"):
            got.set()

    with hold_lease(storage, "lease", brief=True):
        refuse_if_held(storage, "lease")
        waiting = threading.Thread(target=take)
        waiting.start()
        assert not got.wait(3 * lease_module.BRIEFLY_S)
    assert got.wait(60)
    waiting.join()


class StuckStorage(Storage):
    """One whose heartbeats hang, once `stuck` is set, until `go` is."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.stuck, self.hangs, self.go = threading.Event(), threading.Event(), threading.Event()

    def write_bytes(self, path: str, data: bytes) -> None:
        if self.stuck.is_set() and threading.current_thread().name == "penstock-lease":
            self.hangs.set()
            self.go.wait(30)
        super().write_bytes(path, data)


def test_late_heartbeat_does_not_undo_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "HEARTBEAT_S", 0.02)
    storage = StuckStorage(str(tmp_path))
    with hold_lease(storage, "lease"):
        (beating,) = (thread for thread in threading.enumerate() if thread.name == "penstock-lease")
        storage.stuck.set()
        assert storage.hangs.wait(60)
    storage.go.set()
    beating.join()
    assert current_holder(storage, "lease") is None


def test_failed_release_does_not_hide_error_of_block(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="what happened"), hold_lease(Storage(str(tmp_path / "s")), "lease"):
        shutil.rmtree(tmp_path / "s")
        (tmp_path / "s").write_text("no folder any more")
        raise ValueError("what happened")


def test_lease_of_killed_process_is_taken_over_at_once(tmp_path: Path) -> None:
    process = holder_process(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with hold_lease(Storage(str(tmp_path)), "lease") as holder:
        assert holder.process.pid == os.getpid()


def left_abroad(storage: Storage, silent_s: float, path: str = "lease") -> dict[str, Any]:
    """Write the lease of a process on another machine whose last heartbeat was `silent_s` ago by this machine's clock."""
    with hold_lease(storage, path) as holder:
        pass
    process = {**holder.process.model_dump(), "host": "elsewhere", "machine": "another boot"}
    abroad = {**holder.model_dump(), "process": process, "released": False, "heartbeat": time.time() - silent_s}
    storage.write_json(f"{path}/00000001.json", abroad)
    return abroad


def test_remote_holder_keeps_lease_until_heartbeats_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "WATCH_S", 0.2)
    storage = Storage(str(tmp_path))
    left_abroad(storage, lease_module.EXPIRES_S / 2)
    with pytest.raises(LeaseHeldError, match="elsewhere"), hold_lease(storage, "lease"):
        pass
    left_abroad(Storage(str(tmp_path / "b")), lease_module.EXPIRES_S + 1)
    with hold_lease(Storage(str(tmp_path / "b")), "lease"):
        assert Storage(str(tmp_path / "b")).list("lease")[-1] == "00000002.json"


def test_dead_holder_with_clock_ahead_is_replaced_after_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "WATCH_S", 0.2)
    storage = Storage(str(tmp_path))
    left_abroad(storage, -3600)
    with hold_lease(storage, "lease"):
        assert storage.list("lease")[-1] == "00000002.json"


@pytest.mark.parametrize("behind_s", [3600, -3600])
def test_living_holder_with_skewed_clock_keeps_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind_s: float) -> None:
    monkeypatch.setattr(lease_module, "WATCH_S", 60.0)
    monkeypatch.setattr(lease_module, "HEARTBEAT_S", 0.05)
    storage = Storage(str(tmp_path))
    abroad = left_abroad(storage, behind_s)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.02):
            abroad["heartbeat"] += 0.02
            storage.write_json("lease/00000001.json", abroad)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(LeaseHeldError, match="elsewhere"), hold_lease(storage, "lease"):
            pass
        assert current_holder(storage, "lease") is None
        assert current_holder(storage, "lease", watch=True) is not None, "clean deletes nothing of it"
    finally:
        stop.set()
        beating.join()


def test_unanswered_create_does_not_block_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(str(tmp_path))
    original = Storage.create_exclusive

    def without_answer(*given: Any) -> NoReturn:
        original(*given)
        raise ServiceError("cut", next_step="again")

    with monkeypatch.context() as cut:
        cut.setattr(Storage, "create_exclusive", without_answer)
        with pytest.raises(ServiceError, match="cut"), hold_lease(storage, "lease"):
            pass
    assert current_holder(storage, "lease") is None
    with hold_lease(storage, "lease"):
        pass


def test_owner_is_notified_of_newer_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "HEARTBEAT_S", 0.02)
    lost: queue.Queue[LeaseHeldError] = queue.Queue()
    storage = Storage(str(tmp_path))
    with hold_lease(storage, "lease", on_lost=lost.put) as holder:
        usurper = {**holder.model_dump(), "owner": "usurper", "process": {**holder.process.model_dump(), "host": "elsewhere"}}
        storage.write_json("lease/00000002.json", usurper)
        error = lost.get(timeout=30)
    assert f"was taken over by pid {os.getpid()} on elsewhere" in error.message
    assert storage.read_json("lease/00000002.json") == usurper


def test_owner_is_notified_of_other_owner_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "HEARTBEAT_S", 0.02)
    lost = threading.Event()
    storage = Storage(str(tmp_path))
    with hold_lease(storage, "lease", on_lost=lambda _error: lost.set()) as holder:
        usurped = json.dumps({**holder.model_dump(), "owner": "usurper"}).encode()
        while not lost.wait(0.02):  # a heartbeat in flight may overwrite it once
            storage.write_bytes("lease/00000001.json", usurped)
    assert json.loads(storage.read_bytes("lease/00000001.json")) == json.loads(usurped), (
        "a loser leaves the winner's file alone"
    )


def test_nested_lease_leaves_nothing_in_a_store(
    s3_server: SwiftServer, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letters are requests: a list, get, put or delete, or the delete of several at once."""
    monkeypatch.setattr(lease_module, "HEARTBEAT_S", 3600.0)
    monkeypatch.setattr(lease_module, "OLD_GENERATIONS", 2)
    asked: list[str] = []

    def letter(asked: str) -> str:
        return "L" if "list-type" in asked else "S" if asked.startswith("POST ") and "?delete" in asked else asked[0]

    nested, unused = {"nested": True}, {"nested": True, "unused": True}
    with faulty_front(urlsplit(s3_server.endpoint).port or 0, asked.append) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        storage = Storage(s3_bucket)
        for how, requests in ((nested, "LPGGD"), (unused, "PGGD"), (unused, "PGGD"), ({}, "LPGGP"), ({}, "LGPGGP")):
            asked.clear()
            with hold_lease(storage, "lease", **how):
                pass
            assert "".join(map(letter, asked)) == requests
            assert current_holder(storage, "lease") is None and storage.exists("lease") is not bool(how)
        for left, requests in ((3, "LGPGGP"), (2, "LGPGSGP"), (3, "LGPGGP"), (2, "LGPGSGP")):
            asked.clear()
            with hold_lease(storage, "lease"):
                pass
            assert ("".join(map(letter, asked)), len(storage.list("lease"))) == (requests, left)
            assert current_holder(storage, "lease") is None


@pytest.mark.parametrize("living", [True, False])
@pytest.mark.parametrize("on_store", [False, pytest.param(True, marks=pytest.mark.s3)])
def test_lease_that_is_not_unused_is_listed(
    tmp_path: Path, request: pytest.FixtureRequest, living: bool, on_store: bool
) -> None:
    root = request.getfixturevalue("s3_bucket") if on_store else str(tmp_path)
    storage, process = Storage(root), holder_process(root)
    try:
        if living:
            with pytest.raises(LeaseHeldError, match=f"pid {process.pid} on "):
                hold_lease(storage, "lease", nested=True, unused=True).__enter__()
            assert storage.list("lease") == ["00000001.json"]
        else:
            process.kill()
            process.wait()
            with hold_lease(storage, "lease", nested=True, unused=True):
                assert storage.list("lease") == ["00000001.json", "00000002.json"]
    finally:
        process.communicate()
