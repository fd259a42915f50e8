"""Do lines that user code prints, logs and draws as a bar arrive once, without secrets, and a bar as its last state?"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tqdm import tqdm

from penstock.flows.run.reporter import ConsoleReporter
from penstock.ingest.phases import count_fetched
from penstock.machine.prints import (
    MAX_LINES,
    copying_prints,
    is_worth_a_line,
    keeping_prints,
    passing_prints,
    print_again,
    printed_before,
)
from penstock.training.events import Event, Printed, ShardsFetched
from penstock.training.loop.event_sender import sending_prints_and_fetches

SECRET = "http://alice:canary@host"


@contextlib.contextmanager
def handled() -> Iterator[logging.StreamHandler[Any]]:
    """A root logger whose one handler lets nothing through, as Prefect's in a command."""
    root, handler = logging.getLogger(), logging.StreamHandler(io.StringIO())
    handler.setLevel(logging.CRITICAL)
    before, root.handlers = root.handlers, [handler]
    try:
        yield handler
    finally:
        assert root.handlers == [handler]
        root.handlers = before


def speak() -> None:
    print("printed", SECRET)
    print("a part", end="")
    sys.stderr.writelines(["to stderr\n", "\n"])
    logging.getLogger("their.model").warning("logged")


def test_lines_of_this_thread_go_to_take_only(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []

    def take(line: str) -> None:
        print("taken")
        lines.append(line)

    before = sys.stdout, sys.stderr
    with handled(), passing_prints(take):
        speak()
        other = threading.Thread(target=print, args=["in another thread"])
        other.start()
        other.join()
        assert not sys.stdout.isatty() and sys.stderr.encoding == before[1].encoding
    assert (sys.stdout, sys.stderr) == before
    assert lines == ["printed http://***@host", "to stderr", "logged", "a part"]
    assert capsys.readouterr().out == "taken\n" * 3 + "in another thread\n" + "taken\n"


def test_handled_and_library_warnings_are_not_lines() -> None:
    lines: list[str] = []
    with handled() as handler:
        handler.setLevel(logging.WARNING)
        with passing_prints(lines.append):
            logging.warning("written already")
    with handled(), passing_prints(lines.append):
        record = logging.LogRecord("urllib3", logging.WARNING, pytest.__file__, 1, "retries", None, None)
        assert is_worth_a_line(record), "on a training worker, whose libraries warn of what is trained there"
        record.levelno = logging.INFO
        assert not is_worth_a_line(record)
        assert is_worth_a_line(logging.LogRecord("mine", logging.INFO, __file__, 1, "told", None, None))
        record.levelno = logging.WARNING
        logging.getLogger("urllib3").handle(record)
        logging.warning("mine")
    assert lines == ["mine"]


def test_lines_of_all_threads_are_copied_and_new_handlers_work(capsys: pytest.CaptureFixture[str]) -> None:
    first: list[str] = []
    second: list[str] = []
    log = logging.getLogger("their.own")
    with copying_prints(first.append):
        log.addHandler(handler := logging.StreamHandler())  # as `logging.basicConfig` in a module that stays imported
        threads = [threading.Thread(target=print, args=[f"thread {number}"]) for number in range(2)]
        for thread in threads:
            thread.start()
            thread.join()
    with copying_prints(second.append):
        log.warning("logged later")
    log.removeHandler(handler)
    print("outside")
    assert (first, second) == (["thread 0", "thread 1"], ["logged later"])
    assert capsys.readouterr() == ("thread 0\nthread 1\noutside\n", "logged later\n")


def test_worker_sends_printed_lines_and_fetched_bytes_with_rank() -> None:
    sent: list[Event] = []

    class Client:
        def put(self, events: list[Event]) -> bool:
            sent.extend(events)
            return False

    count_fetched(5)  # by a task that ran in this process before
    with sending_prints_and_fetches(Client(), 3):
        count_fetched(1000)
        count_fetched(200, wait_s=0.5)
        print(f"first {SECRET}\nsecond", file=sys.stderr)
        print("\n".join(str(number) for number in range(MAX_LINES)))
    events = [event for event in sent if isinstance(event, Printed)]
    lines = [line for event in events for line in event.lines]
    assert {event.rank for event in events} == {3}
    assert lines[:3] == ["first http://***@host", "second", "0"] and lines[-1] == "... and 2 more lines"
    *_, fetched = [event for event in sent if isinstance(event, ShardsFetched)]
    assert (fetched.rank, fetched.host, fetched.pid) == (3, socket.gethostname(), os.getpid())
    assert (fetched.bytes, fetched.wait_s) == (1200, 0.5)


def test_error_carries_lines_printed_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="broken") as caught, keeping_prints():
        print("about to fail", SECRET)
        raise ValueError("broken")
    capsys.readouterr()
    print_again(printed_before(pickle.loads(pickle.dumps(caught.value))))
    assert capsys.readouterr().out == "about to fail http://***@host\n"
    assert printed_before(ValueError()) == []


def test_a_progress_bar_gives_its_last_state() -> None:
    lines: list[str] = []
    with passing_prints(lines.append):
        list(tqdm(range(30), mininterval=0, bar_format="rows {n_fmt}"))
        for _ in tqdm(range(2), mininterval=0, bar_format="epochs {n_fmt}"):
            list(tqdm(range(30), mininterval=0, bar_format="steps {n_fmt}", leave=False))
        for number in range(3):
            sys.stdout.write(f"{number}/3\r")
        print("\nthe end\r")
    assert lines[0] == "rows 30" and lines[-3:] == ["epochs 2", "2/3", "the end"]
    assert {*lines[1:-3]} <= {"epochs 0", "epochs 1"}, "an inner bar moves 30 times"


def test_line_above_a_progress_bar_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    reporter = ConsoleReporter()
    with passing_prints(lambda line: reporter.report(f"train: {line}")):
        reporter.progress("train")(1, 2, "steps")
        print("hello")
        reporter.report("train: continues")
        reporter._stop()
    assert screen.getvalue().count("train: hello") == 1
    assert screen.getvalue().count("train: continues") == 1 and "train: train:" not in screen.getvalue()
