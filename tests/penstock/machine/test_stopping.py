"""A signal may arrive anywhere, also inside code that makes its own error of every exception."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import Interrupted, LeaseHeldError, SpecError
from penstock.machine.stopping import StopRequest, stop_behind, stopping_on_signals


def test_stop_is_found_among_causes_of_an_error() -> None:
    request = StopRequest()
    with stopping_on_signals(request), pytest.raises(SpecError) as caught:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        except Exception as error:
            raise SpecError("the recipe cannot be constructed") from error
    stopped = stop_behind(caught.value)
    assert isinstance(stopped, Interrupted) and stopped.exit_code == 130

    with pytest.raises(TypeError) as raised_while_handling:
        try:
            raise Interrupted(signal.SIGTERM)
        except Interrupted:
            len(5)  # type: ignore[arg-type]
    assert stop_behind(raised_while_handling.value) is not None
    assert stop_behind(SpecError("a plain one")) is None


def test_only_second_signal_interrupts_graceful_work() -> None:
    request = StopRequest()
    request.graceful = True
    with stopping_on_signals(request):
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.stop.wait(60)
        with pytest.raises(Interrupted) as second:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
    assert second.value.exit_code == 143, "the first signal says why"


def test_lost_lease_ends_graceful_work() -> None:
    request = StopRequest()
    request.graceful = True
    lost = LeaseHeldError("taken over")
    with stopping_on_signals(request):
        with pytest.raises(LeaseHeldError) as caught:
            threading.Thread(target=request.give_up, args=[lost]).start()
            signal.pause()
        assert caught.value is lost and stop_behind(caught.value) is lost
        with pytest.raises(LeaseHeldError):
            request.check()
    assert not request.stop.is_set() and request.received == [], "nobody has asked to save and stop"
    request.give_up(lost)  # no handler, no signal


def test_import_finishes_before_a_signal_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text(
        "import os, signal, time\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(0.3)\n"  # the signal is looked at several times meanwhile
        "finished = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    request, before = StopRequest(), signal.getsignal(signal.SIGTERM)
    with stopping_on_signals(request), pytest.raises(Interrupted):
        importlib.import_module("slow_to_import")
        signal.pause()
    assert sys.modules["slow_to_import"].finished and request.received == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before

    twice = "import os, signal\nfor _ in 'ab': os.kill(os.getpid(), signal.SIGINT)\nsignal.pause()\n"
    (tmp_path / "endless.py").write_text(twice)
    request = StopRequest()
    with stopping_on_signals(request), pytest.raises(Interrupted):
        importlib.import_module("endless")
    assert len(request.received) == 2, "the second signal does not wait"


class SignalledLock:
    """logging's lock, in whose release a signal arrives."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def acquire(self) -> None:
        self._lock.acquire()

    def release(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        self._lock.release()

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()


@pytest.mark.skipif(not hasattr(logging, "_releaseLock"), reason="this Python's logging has no function there")
def test_signal_during_fork_is_kept_and_leaves_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = logging._lock  # type: ignore[attr-defined]
    request = StopRequest()
    with stopping_on_signals(request), pytest.raises(Interrupted):
        monkeypatch.setattr(logging, "_lock", SignalledLock(lock))
        child = os.fork()
        if child == 0:
            os._exit(0)
        monkeypatch.setattr(logging, "_lock", lock)
        os.waitpid(child, 0)
        signal.pause()
    free: list[bool] = []
    other = threading.Thread(target=lambda: free.append(lock.acquire(timeout=60)) or lock.release())
    other.start()
    other.join()
    assert free == [True] and request.received == [signal.SIGINT]
