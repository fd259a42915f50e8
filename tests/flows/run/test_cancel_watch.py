"""Does a cancel in Prefect reach the process once, and only if nobody else tells it?"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.flows.run import cancel_watch
from penstock.machine.stopping import StopRequest, stopping_on_signals

SOON_S = 0.01


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel_watch, "ASK_EVERY_S", SOON_S)


@contextmanager
def watched(stopping: StopRequest, answers: list[bool], patience_s: float) -> Iterator[threading.Event]:
    """Watch in a thread, as a flow run does, until the last answer has been given; it is given again if it is a no."""
    done, answered = threading.Event(), threading.Event()

    def is_cancelled() -> bool:
        if len(answers) == 1:
            answered.set()
        return answers.pop(0) if len(answers) > 1 else answers[0]

    thread = threading.Thread(target=cancel_watch._watch, args=(is_cancelled, stopping.stop, done, patience_s), daemon=True)
    with stopping_on_signals(stopping):
        thread.start()
        assert answered.wait(60)
        yield done
        thread.join(timeout=60)
        assert not thread.is_alive()


def graceful() -> StopRequest:
    stopping = StopRequest()
    stopping.graceful = True
    return stopping


def test_cancelled_terminal_run_gets_one_signal() -> None:
    with watched(stopping := graceful(), [False, False, True], patience_s=0):
        assert stopping.stop.wait(60)
    assert stopping.received == [signal.SIGTERM]


def test_run_signalled_by_worker_gets_no_second_signal() -> None:
    with watched(stopping := graceful(), [True], patience_s=60):
        signal.raise_signal(signal.SIGTERM)
    assert stopping.received == [signal.SIGTERM]


def test_silent_worker_is_replaced_by_own_signal() -> None:
    with watched(stopping := graceful(), [True], patience_s=0.05):
        assert stopping.stop.wait(60)
    assert stopping.received == [signal.SIGTERM]


def test_ended_run_gets_no_signal() -> None:
    with watched(stopping := StopRequest(), [False, False], patience_s=0) as done:
        done.set()
    assert stopping.received == []
    ends = threading.Event()
    with stopping_on_signals(stopping):
        cancel_watch._watch(lambda: ends.set() is None, stopping.stop, ends, 0)  # while the answer is on its way
    assert stopping.received == []
