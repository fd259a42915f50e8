"""How does what user code prints, warns and logs reach the person who started the run, with where it comes from?

A progress bar draws the same line many times a second: its last state is a line, and one in some seconds while it moves.
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

from penstock.machine.drawn_line import DrawnLine
from penstock.own_code import PACKAGE_DIR
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
"""That `KeptLines` holds; what a loop prints beyond them is counted, not shown."""


@contextlib.contextmanager
def passing_prints(take: Callable[[str], None]) -> Iterator[None]:
    """Give the lines that this thread prints in the block to `take`, which may print itself, instead of writing them.

    Where loggers have handlers that let nothing through, as Prefect's in a command, warnings that user code logs go there too.
    """
    taker = _Taker(take, writes=False)
    root = logging.getLogger()
    log = _UserLog(taker) if root.handlers else None
    token = _OF_THREAD.set(taker)
    if log is not None:
        root.addHandler(log)
    try:
        with _replaced_streams():
            yield
    finally:
        if log is not None:
            root.removeHandler(log)
        taker.end()
        _OF_THREAD.reset(token)


def aloud(say: Callable[[str], None]) -> Callable[[str], None]:
    """The same, and what it prints is written: for what is no user code's in a block of `passing_prints`."""

    def write(text: str) -> None:
        token = _OF_THREAD.set(None)
        try:
            say(text)
        finally:
            _OF_THREAD.reset(token)

    return write


@contextlib.contextmanager
def copying_prints(take: Callable[[str], None]) -> Iterator[None]:
    """Give the lines that any thread of this process prints in the block to `take`; they are written as before, too."""
    taker = _Taker(take, writes=True)
    _OF_PROCESS.append(taker)
    try:
        with _replaced_streams():
            yield
    finally:
        _OF_PROCESS.remove(taker)
        taker.end()


class KeptLines:
    """Lines that wait to be sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a process that is forked off never gets here
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
        """The lines since the last call, the last of which may say how many there were besides."""
        with self._lock:
            lines, more, self._lines, self._more = self._lines, self._more, [], 0
        return [*lines, f"... and {more:,} more lines"] if more else lines


@contextlib.contextmanager
def keeping_prints() -> Iterator[KeptLines]:
    """Keep what is printed in the block, for a task to return; an error that leaves the block takes it along."""
    kept = KeptLines()
    try:
        with copying_prints(kept.add):
            yield kept
    except BaseException as error:
        error.__dict__[_PRINTED] = kept.take()
        raise


def printed_before(error: BaseException) -> list[str]:
    """What was printed before an error that has left `keeping_prints`, here or elsewhere; Ray's names it as `cause`."""
    carries = error if hasattr(error, _PRINTED) else getattr(error, "cause", None)
    return list(getattr(carries, _PRINTED, ()))


def print_again(lines: Iterable[str]) -> None:
    """Print in this process what was printed in another."""
    for line in lines:
        print(line)


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether a log record is user code's, or a warning: what libraries tell of themselves is neither."""
    return record.levelno >= logging.WARNING or not _is_of_library(record)


def _is_of_library(record: logging.LogRecord) -> bool:
    return record.pathname.startswith(_LIBRARIES)


_PRINTED = "_penstock_printed"

_OF_THREAD: ContextVar[_Taker | None] = ContextVar("penstock_prints", default=None)

_OF_PROCESS: list[_Taker] = []


class _Taker:
    """Hands whole lines on.

    Args:
        writes: what is printed is written as before, too.
    """

    def __init__(self, take: Callable[[str], None], *, writes: bool) -> None:
        self.writes = writes
        self.pid = os.getpid()
        self._take = aloud(take)
        self._lines: dict[tuple[int, str], DrawnLine] = {}

    def hear(self, stream: str, text: str) -> None:
        """Take in what this thread writes to a stream."""
        key = threading.get_ident(), stream
        for line in self._lines.setdefault(key, DrawnLine()).add(text):
            self.tell(line)

    def tell(self, line: str) -> None:
        """Hand a line on."""
        self._take(redact_text(line))

    def end(self) -> None:
        """Hand on what all threads have begun."""
        for begun in [*self._lines.values()]:  # a thread may still print
            for line in begun.add("\n"):
                self.tell(line)


class _Stream:
    """A stdout or stderr whose lines are heard; all else is asked of the stream below. What keeps it may go on to use it."""

    def __init__(self, name: str, below: TextIO) -> None:
        self._name, self.below = name, below

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def isatty(self) -> bool:
        """It is none: lines go elsewhere."""
        return False

    def write(self, text: str) -> int:
        """Hand the lines on that end in the text."""
        taker = _OF_THREAD.get() or [None, *_OF_PROCESS][-1]  # other threads begin and end blocks meanwhile
        heard = taker is not None and taker.pid == os.getpid()  # else of a process that was forked off
        if taker is None or not heard or taker.writes:
            self.below.write(text)
        if taker is not None and heard:
            taker.hear(self._name, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write one after the other."""
        for line in lines:
            self.write(line)


_REPLACING = threading.Lock()

_replaced: list[_Stream] = []
"""Of this process, while any thread is in a block."""

_blocks: list[None] = []


@contextlib.contextmanager
def _replaced_streams() -> Iterator[None]:
    """Put streams that are heard in place of stdout and stderr, until the last block ends."""
    with _REPLACING:
        _blocks.append(None)
        if len(_blocks) == 1:
            for name in ("stdout", "stderr"):
                _replaced.append(stream := _Stream(name, getattr(sys, name)))
                setattr(sys, name, stream)
    try:
        yield
    finally:
        with _REPLACING:
            _blocks.pop()
            while not _blocks and _replaced:
                stream = _replaced.pop()
                name = stream._name
                if getattr(sys, name) is stream:
                    setattr(sys, name, stream.below)


class _UserLog(logging.Handler):
    """Hears the warnings that user code logs, where no other handler would write them."""

    def __init__(self, taker: _Taker) -> None:
        super().__init__(logging.WARNING)
        self._taker = taker

    def emit(self, record: logging.LogRecord) -> None:
        """Hand the record on, as Python itself writes it."""
        if _OF_THREAD.get() is self._taker and not _is_of_library(record) and not self._is_written(record):
            for line in self.format(record).splitlines():
                self._taker.tell(line)

    def _is_written(self, record: logging.LogRecord) -> bool:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(each is not self and each.level <= record.levelno for each in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


_LIBRARIES = (sys.prefix + os.sep, sys.base_prefix + os.sep, str(PACKAGE_DIR) + os.sep)
"""Where code lies that is no user's."""
