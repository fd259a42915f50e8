"""Which phase of preparing and reading rows does a process work on? It is reported to a clock, if one runs.

`penstock probe` runs a clock in each process that reads. Training runs none: a phase then costs half a microsecond per shard,
table or group of batches. Fetched shards are always counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, Protocol, TypeVar, get_args

__all__ = ["PHASES", "Clock", "FetchCount", "Phase", "count_fetched", "fetched_so_far", "phase", "run_clock", "timed"]

Phase = Literal["fetch", "read", "decode", "transform", "gather", "augment", "copy", "tasks"]
"""`fetch`: get shards from a remote store or another node; `read`: open and parse files and shards; `decode`: decode images;
`transform`: run transforms; `gather`: copy rows into a batch; `augment`: run the recipe's augmentation; `copy`: copy the batch
to the GPU; `tasks`: wait for the rows of a stream, which its tasks prepare."""

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)

T = TypeVar("T")


class Clock(Protocol):
    """Counts seconds by phase in one process."""

    def enter(self, name: Phase) -> None:
        """Begin a phase in this thread."""

    def leave(self) -> None:
        """End the last phase that this thread began."""


_running: Clock | None = None


def run_clock(clock: Clock | None) -> Clock | None:
    """Let `clock` count in this process from now on; return the one before."""
    global _running
    before, _running = _running, clock
    return before


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


class FetchCount(NamedTuple):
    """What this process has fetched since its start."""

    bytes: int = 0
    """Of shards that came from a remote store into the node's cache."""
    wait_s: float = 0.0
    """Seconds that feeds waited for shards, which other threads and processes of the node may fetch."""


_fetched = FetchCount()
_fetched_lock = threading.Lock()


def count_fetched(num_bytes: int = 0, wait_s: float = 0.0) -> None:
    """Count a fetched shard, or a wait for one, in any thread."""
    global _fetched
    with _fetched_lock:
        _fetched = FetchCount(_fetched.bytes + num_bytes, _fetched.wait_s + wait_s)


def fetched_so_far() -> FetchCount:
    """Return the bytes and seconds of this process until now."""
    return _fetched
