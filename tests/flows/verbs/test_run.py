"""Is a signal answered at once, whatever it meets?"""

from __future__ import annotations

import signal
import threading
import time

import pytest

from penstock.errors import Interrupted
from penstock.flows.verbs import run
from penstock.machine.stopping import StopRequest


def test_a_signal_that_meets_no_training_is_answered_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    stopping, said, deadline = StopRequest(), "", time.monotonic() + 30
    with pytest.raises(Interrupted), run.interrupts_once_stopped(stopping):
        stopping.received.append(signal.SIGINT)
        stopping.stop.set()
        while not said and time.monotonic() < deadline:
            said = capsys.readouterr().err
            time.sleep(0.01)
        raise RuntimeError("what Prefect makes of it")
    assert said == "  stopping: what has been started ends first\n"


def test_a_training_that_is_stopped_says_so_itself(capsys: pytest.CaptureFixture[str]) -> None:
    stopping = StopRequest()
    stopping.graceful = True
    stopping.received.append(signal.SIGINT)
    run._tell_that_it_stops(stopping, threading.Event())
    assert not capsys.readouterr().err
