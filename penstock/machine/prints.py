"""How do the lines that user code prints, warns and logs reach the console and the driver?

A progress bar redraws its line after a carriage return: its last state is one line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TextIO

from penstock.installed import PACKAGE_DIR
from penstock.redact import redact_text

__all__ = [
    "KeptLines",
    "aloud",
    "copying_prints",
    "is_worth_a_line",
    "keeping_prints",
    "passing_prints",
    "print_again",
    "printed_before",
]

MAX_LINES = 100
"""`KeptLines` holds so many; further ones, as from a loop that prints, are only counted."""


@contextlib.contextmanager
def passing_prints(take: Callable[[str], None]) -> Iterator[None]:
    """Give the lines that this thread prints in the block to `take`, which may print itself, instead of writing them.

    If no handler of the root logger shows warnings, as Prefect's in a command, `take` gets those of user code, too.
    """
    lines, root = _Lines(take, thread=threading.get_ident()), logging.getLogger()
    is_quiet = bool(root.handlers) and all(handler.level > logging.WARNING for handler in root.handlers)
    with _reading_streams(lines):
        log = logging.StreamHandler()
        log.setLevel(logging.WARNING)
        log.addFilter(lambda record: record.thread == lines.thread and not _is_of_library(record))
        if is_quiet:
            root.addHandler(log)
        try:
            yield
        finally:
            root.removeHandler(log)


def aloud(say: Callable[[str], None]) -> Callable[[str], None]:
    """Make a function whose prints are written even in a block of `passing_prints`: for penstock's own lines."""

    def write(text: str) -> None:
        token = _IS_ALOUD.set(True)
        try:
            say(text)
        finally:
            _IS_ALOUD.reset(token)

    return write


@contextlib.contextmanager
def copying_prints(take: Callable[[str], None]) -> Iterator[None]:
    """Give the lines that any thread prints in the block to `take`, and write them, too."""
    with _reading_streams(_Lines(take)):
        yield


class KeptLines:
    """Collects lines until they are sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a forked process never uses it
        self._lines: list[str] = []
        self._more = 0

    def add(self, line: str) -> None:
        """Keep a line, or count it."""
        with self._lock:
            if len(self._lines) < MAX_LINES:
                self._lines.append(line)
            else:
                self._more += 1

    def take(self) -> list[str]:
        """Return the lines since the last call; a last one counts those that were not kept."""
        with self._lock:
            lines, more, self._lines, self._more = self._lines, self._more, [], 0
        return [*lines, f"... and {more:,} more lines"] if more else lines


@contextlib.contextmanager
def keeping_prints() -> Iterator[KeptLines]:
    """Collect the lines that are printed in the block, for a task to return; an error that leaves the block carries them."""
    kept = KeptLines()
    try:
        with copying_prints(kept.add):
            yield kept
    except BaseException as error:
        error.__dict__[_PRINTED] = kept.take()
        raise


def printed_before(error: BaseException) -> list[str]:
    """Return the lines that an error from `keeping_prints` carries, or the `cause` of Ray's error for it."""
    carries = error if hasattr(error, _PRINTED) else getattr(error, "cause", None)
    return list(getattr(carries, _PRINTED, ()))


def print_again(lines: Iterable[str]) -> None:
    """Print in this process the lines that were printed in another."""
    for line in lines:
        print(line)


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether a log record is user code's, or a warning; a library's information is neither."""
    return record.levelno >= logging.WARNING or not _is_of_library(record)


def _is_of_library(record: logging.LogRecord) -> bool:
    return record.pathname.startswith(_LIBRARIES)


_LIBRARIES = (sys.prefix + os.sep, sys.base_prefix + os.sep, str(PACKAGE_DIR) + os.sep)
"""Folders of code that is not a user's."""

_PRINTED = "_penstock_printed"

_UP = "\x1b[A"
"""Moves a terminal's cursor up: a bar below another bar writes it after each of its states."""

_IS_ALOUD: ContextVar[bool] = ContextVar("penstock_is_aloud", default=False)


class _Lines:
    """Joins text to whole lines and gives them to `take`.

    Args:
        thread: gets the text of this thread, which is then not written; None for all threads, whose text is written, too.
    """

    def __init__(self, take: Callable[[str], None], thread: int | None = None) -> None:
        self.thread = thread
        self.pid = os.getpid()
        self._take = aloud(take)
        self._begun: dict[tuple[int, str], str] = {}

    def add(self, stream: str, text: str) -> None:
        """Add text that the current thread writes to a stream."""
        key = threading.get_ident(), stream
        *whole, begun = (self._begun.get(key, "") + text).split("\n")
        self._begun[key] = begun[begun.rstrip("\r").rfind("\r") + 1 :]
        for line in whole:
            self._give(line)

    def end(self) -> None:
        """Give the unfinished lines of all threads."""
        for begun in [*self._begun.values()]:  # a thread may still print
            self._give(begun)

    def _give(self, line: str) -> None:
        last = line.rstrip().rpartition("\r")[2]
        if last and _UP not in last:
            self._take(redact_text(last))


class _Stream:
    """A stdout or stderr whose lines are read; `below` does the rest. Objects may keep and use it after the block."""

    def __init__(self, name: str, below: TextIO) -> None:
        self.name, self.below = name, below

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def isatty(self) -> bool:
        """Return False: lines go elsewhere."""
        return False

    def write(self, text: str) -> int:
        """Add text to the lines of the innermost block that this thread is in."""
        mine = (each for each in reversed(_reading) if each.thread in (None, threading.get_ident()))
        lines = None if _IS_ALOUD.get() else next(mine, None)
        if lines is not None and lines.pid != os.getpid():  # this process was forked
            lines = None
        if lines is None or lines.thread is None:
            self.below.write(text)
        if lines is not None:
            lines.add(self.name, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several lines."""
        for line in lines:
            self.write(line)


_CHANGING = threading.Lock()

_reading: list[_Lines] = []
"""One for each block that a thread of this process is in, the outer ones first."""

_streams: list[_Stream] = []
"""The streams of this process, while any thread is in a block."""


@contextlib.contextmanager
def _reading_streams(lines: _Lines) -> Iterator[None]:
    """Replace stdout and stderr by streams whose text is read, until the last block ends."""
    with _CHANGING:
        _reading.append(lines)
        if len(_reading) == 1:
            for name in ("stdout", "stderr"):
                _streams.append(stream := _Stream(name, getattr(sys, name)))
                setattr(sys, name, stream)
    try:
        yield
    finally:
        lines.end()
        with _CHANGING:
            _reading.remove(lines)
            while not _reading and _streams:
                stream = _streams.pop()
                if getattr(sys, stream.name) is stream:
                    setattr(sys, stream.name, stream.below)
