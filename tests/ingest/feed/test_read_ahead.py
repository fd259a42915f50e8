"""Reading ahead: the order of items, and the end of the thread when the reader stops."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from penstock.ingest.feed.read_ahead import ahead


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
