"""Which process is alive, told with real ones."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from penstock.machine.process import ProcessIdentity, _started


def identity_of(pid: int) -> ProcessIdentity:
    return ProcessIdentity.current().model_copy(update={"pid": pid, "started": _started(pid)})


def test_child_is_alive_until_killed_and_zombie_is_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    theirs = identity_of(child.pid)
    assert theirs.is_alive is True
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert theirs.is_alive is False
    child.wait()
    assert theirs.is_alive is False


def test_process_identity_survives_a_clock_change(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ProcessIdentity.current()
    # A clock cannot be set for a test alone; what the kernel then tells differently is when the machine was booted.
    booted = psutil.boot_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: booted + 3600)
    assert before.is_alive is True and ProcessIdentity.current() == before


def test_reused_pid_is_another_process() -> None:
    assert ProcessIdentity.current().is_alive is True
    assert ProcessIdentity.current().model_copy(update={"started": 1.0}).is_alive is False


def test_same_host_after_reboot_is_another_machine() -> None:
    assert ProcessIdentity.current().model_copy(update={"machine": "another boot"}).is_alive is None
    assert ProcessIdentity.current().model_copy(update={"host": "elsewhere"}).is_alive is None
