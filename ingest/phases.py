"""How much time does each phase of preparing and reading rows take? A clock adds up seconds by phase.

`penstock probe` runs a clock in each process that reads. Training runs none: a phase then costs half a microsecond per shard,
table or group of batches.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, Literal, TypeVar, get_args

__all__ = [
    "PHASES",
    "Phase",
    "PhaseClock",
    "count_fetched",
    "counting",
    "phase",
    "timed",
]


Phase = Literal["fetch", "read", "decode", "transform", "gather", "augment", "copy", "tasks"]
"""`fetch`: get shards from a remote store or another node; `read`: open and parse files and shards; `decode`: decode images;
`transform`: run transforms; `gather`: copy rows into a batch; `augment`: run the recipe's augmentation; `copy`: copy the batch
to the GPU; `tasks`: wait for the rows of a stream, which its tasks prepare."""

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)

T = TypeVar("T")


class PhaseClock:
    """Seconds by phase in one process. The time of nested phases counts for the innermost."""

    def __init__(self) -> None:
        self.fetched_bytes = 0
        """Bytes of shards from a remote store."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._lock = threading.Lock()
        self._open = threading.local()

    def take(self) -> dict[Phase, float]:
        """Return the seconds so far and restart from 0."""
        with self._lock:
            seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return seconds

    def enter(self, name: Phase) -> None:
        """Begin a phase in this thread."""
        self._stack().append([name, time.perf_counter(), 0.0])

    def leave(self) -> None:
        """End the last phase that this thread began."""
        stack = self._stack()
        name, began_s, inner_s = stack.pop()
        spent_s = time.perf_counter() - began_s
        if stack:
            stack[-1][2] += spent_s
        with self._lock:
            self._seconds[name] += spent_s - inner_s

    def _stack(self) -> list[list[Any]]:
        if not hasattr(self._open, "stack"):
            self._open.stack = []
        return self._open.stack  # type: ignore[no-any-return]


_running: PhaseClock | None = None


@contextlib.contextmanager
def counting() -> Iterator[PhaseClock]:
    """Run a clock in this process during the block."""
    global _running
    before, _running = _running, PhaseClock()
    try:
        yield _running
    finally:
        _running = before


class phase:
    """Count the block's seconds for a phase: `with phase("gather"):`."""

    __slots__ = ("_clock", "_name")

    def __init__(self, name: Phase) -> None:
        self._name, self._clock = name, _running

    def __enter__(self) -> None:
        if self._clock is not None:
            self._clock.enter(self._name)

    def __exit__(self, *_error: object) -> None:
        if self._clock is not None:
            self._clock.leave()


def timed(name: Phase, items: Iterator[T]) -> Iterator[T]:
    """Yield the same items; the time to make each counts for that phase."""
    while True:
        with phase(name):
            item = next(items, _END)
        if item is _END:
            return
        yield item  # type: ignore[misc]


_END = object()


def count_fetched(num_bytes: int) -> None:
    """Count bytes fetched from a remote store into the node's cache, in any thread."""
    if _running is not None:
        _running.fetched_bytes += num_bytes
