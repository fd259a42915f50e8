"""Reading ahead: the thread that makes items, their order, and its end when the reader stops."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from penstock.ingest.feed.read_ahead import ahead


def makers(monkeypatch: pytest.MonkeyPatch, takes_s: float, away_s: Callable[[int], float], count: int) -> list[str]:
    """Which thread made each of `count` items that take `takes_s`, each followed by a pause of the consumer of `away_s`."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def items() -> Iterator[str]:
        for _ in range(count):
            clock[0] += takes_s
            yield threading.current_thread().name

    made = []
    for number, item in enumerate(ahead(items(), 2, once_it_pays=True)):
        made.append(item)
        clock[0] += away_s(number)
    return made


def test_thread_starts_only_if_consumer_works_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    here, thread = threading.current_thread().name, "penstock-feed"
    assert makers(monkeypatch, 0.002, lambda _: 0.0001, 1000) == [here] * 1000
    assert makers(monkeypatch, 0.5, lambda _: 0.5, 5) == [here] + [thread] * 4
    # Of 2 ms each, 1.65 could be saved: after the seventh more than 10 ms are lost.
    mixed = makers(monkeypatch, 0.002, lambda _: 0.01, 20)
    assert mixed.index(thread) == 7
    assert mixed == [here] * 7 + [thread] * 13
    # A consumer that pauses now and then does not work meanwhile.
    assert makers(monkeypatch, 0.002, lambda number: 0.05 if number % 5 == 0 else 0.0, 1000) == [here] * 1000
    # Where making them takes long, also a little time is worth a thread.
    assert makers(monkeypatch, 0.2, lambda _: 0.01, 4) == [here] * 2 + [thread] * 2
    # Items that take no time are not worth a thread, whatever the consumer does.
    assert makers(monkeypatch, 0.00005, lambda _: 1.0, 100) == [here] * 100


@pytest.mark.parametrize("stop", ["close", "error"])
def test_source_is_closed_without_thread(stop: str) -> None:
    closed = []

    def items() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(True)

    source = items()
    reading = ahead(source, 2, once_it_pays=True)
    next(reading)
    if stop == "close":
        reading.close()
    else:
        with pytest.raises(KeyError):
            reading.throw(KeyError("x"))
    assert closed


def test_thread_error_comes_after_earlier_items() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("disk gone")

    for depth in (0, 2):
        seen = []
        with pytest.raises(OSError, match="disk gone"):
            seen.extend(item for item in _noting(ahead(items(), depth), seen))
        assert seen == [1]


def _noting(items: Iterator[int], seen: list[int]) -> Iterator[int]:
    for item in items:
        seen.append(item)
        yield from ()


def test_no_more_than_depth_is_made_ahead() -> None:
    made: list[int] = []
    third = threading.Event()

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if number == 3:
                third.set()
            yield number

    reading = ahead(items(), 3)
    assert next(reading) == 0
    assert third.wait(60)  # one consumed, three ahead
    reading.close()
    assert len(made) <= 5


@pytest.mark.parametrize("depth", [0, 2])
def test_source_is_closed_when_reader_stops(depth: int) -> None:
    closed = threading.Event()

    def items() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    reading = ahead(items(), depth)
    next(reading)
    reading.close()
    assert closed.is_set()


def test_program_ending_inside_epoch_is_not_aborted() -> None:
    script = (
        "import itertools, torch\n"
        "from penstock.ingest.feed.read_ahead import ahead\n"
        "reading = ahead((torch.ones(300_000).sort() for _ in itertools.count()), 1_000_000)\n"
        "next(reading)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
