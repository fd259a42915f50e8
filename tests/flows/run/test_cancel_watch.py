"""Does a cancel in Prefect reach the process once, and only if nobody else tells it?"""

from __future__ import annotations

import signal
import threading

import pytest

from penstock.flows.run import cancel_watch
from penstock.machine.stopping import StopRequest, stopping_on_signals

SOON_S = 0.01


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel_watch, "ASK_EVERY_S", SOON_S)


def watch(stopping: StopRequest, answers: list[bool], patience_s: float) -> threading.Event:
    """Watch in a thread, as a flow run does; the last answer stays. Returns what ends the block."""
    done = threading.Event()

    def is_cancelled() -> bool:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    thread = threading.Thread(target=cancel_watch._watch, args=(is_cancelled, stopping.stop, done, patience_s), daemon=True)
    thread.start()
    thread.join(timeout=0.5)
    done.set()
    thread.join(timeout=10)
    assert not thread.is_alive()
    return done


def test_a_cancelled_run_from_a_terminal_is_signalled_once() -> None:
    stopping = StopRequest()
    stopping.graceful = True
    with stopping_on_signals(stopping):
        watch(stopping, [False, False, True], patience_s=0)
    assert stopping.received == [signal.SIGTERM]


def test_a_run_that_its_worker_has_signalled_gets_no_second_signal() -> None:
    stopping = StopRequest()
    stopping.graceful = True
    with stopping_on_signals(stopping):
        threading.Timer(0.1, signal.raise_signal, [signal.SIGTERM]).start()
        watch(stopping, [True], patience_s=5)
    assert stopping.received == [signal.SIGTERM]


def test_a_worker_that_does_not_signal_is_stood_in_for() -> None:
    stopping = StopRequest()
    stopping.graceful = True
    with stopping_on_signals(stopping):
        watch(stopping, [True], patience_s=0.05)
    assert stopping.received == [signal.SIGTERM]


def test_a_run_that_ended_is_left_alone() -> None:
    stopping = StopRequest()
    with stopping_on_signals(stopping):
        watch(stopping, [False], patience_s=0)
    assert stopping.received == []
