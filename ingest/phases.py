"""Where does time go while rows are prepared and read? Places of the code are named, and a clock adds them up if one runs.

No clock runs in training: a name costs half a microsecond then, and the places are entered once a shard, a table or a group
of batches. `penstock probe` runs one in each process that reads.

Work of other threads counts only while the reader waits for it: what is fetched ahead in time costs nothing.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, TypeVar, get_args

__all__ = [
    "PHASES",
    "Phase",
    "PhaseClock",
    "counting",
    "fetched",
    "fetching",
    "from_metadata",
    "phase",
    "running_clock",
    "timed",
    "to_metadata",
]


Phase = Literal["fetch", "read", "decode", "transform", "gather", "augment", "copy", "tasks"]
"""`fetch`: bytes come from a remote store or another node; `read`: files and shards are opened and parsed; `decode`: images
become pixels; `transform`: transforms; `gather`: rows are copied into a batch; `augment`: the recipe's own change of a
batch; `copy`: the batch goes to the GPU; `tasks`: a stream's rows are waited for while no task of it is seen to work (Ray
starts processes, and hands tables over)."""

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)

T = TypeVar("T")


class PhaseClock:
    """Seconds by phase, of one process. Of phases within each other each second counts for the innermost."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.elsewhere = dict.fromkeys(PHASES, 0.0)
        """What the tasks of a stream say of themselves."""
        self.fetched_bytes = 0
        """Of shards that came from a remote store."""
        self._lock = threading.Lock()
        self._fetching, self._since_s, self._fetched_s = 0, 0.0, 0.0
        self._open = threading.local()

    def take(self) -> dict[Phase, float]:
        """The seconds so far; from now on they count from 0."""
        with self._lock:
            found, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return found

    def hear(self, seconds: Mapping[Phase, float]) -> None:
        """Take in what a task spent on the rows it made."""
        for name, spent_s in seconds.items():
            self.elsewhere[name] += spent_s

    def result(self) -> dict[Phase, float]:
        """Seconds of the reader by phase: its waits for tasks are laid to what the tasks did, as far as they did something."""
        found, busy_s = dict(self.seconds), sum(self.elsewhere.values())
        explained_s = min(found["tasks"], busy_s)
        if busy_s:
            found["tasks"] -= explained_s
            for name, spent_s in self.elsewhere.items():
                found[name] += explained_s * spent_s / busy_s
        return found

    def restart(self) -> dict[Phase, float]:
        """The result so far; from now on it counts from 0."""
        found = self.result()
        self.take()
        self.elsewhere = dict.fromkeys(PHASES, 0.0)
        return found

    def enter(self, name: Phase) -> None:
        """Begin a phase in this thread."""
        self._stack().append([name, time.perf_counter(), 0.0, self._fetch_s()])

    def leave(self) -> None:
        """End the phase that was begun last in this thread."""
        stack = self._stack()
        name, began_s, inner_s, fetched_s = stack.pop()
        spent_s = time.perf_counter() - began_s
        if stack:
            stack[-1][2] += spent_s
        with self._lock:
            own_s = spent_s - inner_s
            if name == "read":
                behind_s = min(own_s, self._fetch_s() - fetched_s)
                self.seconds["fetch"] += behind_s
                own_s -= behind_s
            self.seconds[name] += own_s

    def fetches(self, change: int) -> None:
        """Count a transfer that begins (1) or ends (-1), in any thread."""
        with self._lock:
            now_s = time.perf_counter()
            if self._fetching:
                self._fetched_s += now_s - self._since_s
            self._fetching, self._since_s = self._fetching + change, now_s

    def fetched(self, num_bytes: int) -> None:
        """Count bytes of shards, in any thread."""
        with self._lock:
            self.fetched_bytes += num_bytes

    def _fetch_s(self) -> float:
        """Seconds in which at least one transfer was going on."""
        return self._fetched_s + (time.perf_counter() - self._since_s if self._fetching else 0.0)

    def _stack(self) -> list[list[Any]]:
        if not hasattr(self._open, "stack"):
            self._open.stack = []
        return self._open.stack  # type: ignore[no-any-return]


_running: PhaseClock | None = None


@contextlib.contextmanager
def counting() -> Iterator[PhaseClock]:
    """Run a clock in this process for the block."""
    global _running
    before, _running = _running, PhaseClock()
    try:
        yield _running
    finally:
        _running = before


def running_clock() -> PhaseClock | None:
    """The clock that runs in this process."""
    return _running


class phase:
    """Name what the block does: `with phase("gather"):`."""

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
    """The same items, with the making of each under that name."""
    while True:
        with phase(name):
            item = next(items, _END)
        if item is _END:
            return
        yield item  # type: ignore[misc]


_END = object()


@contextlib.contextmanager
def fetching() -> Iterator[None]:
    """Bytes of a source file come over the network in the block, in whichever thread."""
    clock = _running
    if clock is None:
        yield
        return
    clock.fetches(1)
    try:
        yield
    finally:
        clock.fetches(-1)


def fetched(num_bytes: int) -> None:
    """Count what came from a remote store into the node's cache."""
    if _running is not None:
        _running.fetched(num_bytes)


_KEY = b"penstock.seconds"


def to_metadata(seconds: Mapping[Phase, float]) -> dict[bytes, bytes]:
    """What a task's table says of its own making, as metadata of its schema."""
    return {_KEY: json.dumps(seconds).encode()}


def from_metadata(metadata: Mapping[bytes, bytes] | None) -> dict[Phase, float]:
    """What `to_metadata` has said; nothing where it has not."""
    return json.loads(metadata[_KEY]) if metadata and _KEY in metadata else {}  # type: ignore[no-any-return]
