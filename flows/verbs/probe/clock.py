"""How much time does each phase of preparing and reading rows take in a process? A clock adds up its seconds by phase."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from penstock.ingest.phases import PHASES, Phase, run_clock

__all__ = ["PhaseClock", "counting"]


class PhaseClock:
    """Seconds by phase in one process. The time of nested phases counts for the innermost."""

    def __init__(self) -> None:
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


@contextlib.contextmanager
def counting() -> Iterator[PhaseClock]:
    """Run a clock in this process during the block."""
    clock = PhaseClock()
    before = run_clock(clock)
    try:
        yield clock
    finally:
        run_clock(before)
