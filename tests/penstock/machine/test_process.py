"""Which process is alive, told with real ones."""

from __future__ import annotations

import subprocess
import sys

import psutil

from penstock.machine.process import ProcessIdentity


def test_a_child_lives_until_it_is_killed_even_while_nobody_has_waited_for_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = psutil.Process(child.pid).create_time()
    theirs = ProcessIdentity.current().model_copy(update={"pid": child.pid, "started": started})
    assert theirs.is_alive is True
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert theirs.is_alive is False
    child.wait()
    assert theirs.is_alive is False


def test_a_reused_pid_is_another_process() -> None:
    assert ProcessIdentity.current().is_alive is True
    assert ProcessIdentity.current().model_copy(update={"started": 1.0}).is_alive is False


def test_the_same_host_name_after_a_reboot_is_another_machine() -> None:
    assert ProcessIdentity.current().model_copy(update={"machine": "another boot"}).is_alive is None
    assert ProcessIdentity.current().model_copy(update={"host": "elsewhere"}).is_alive is None
