"""What must a forked process make anew? Threads, which a fork leaves behind, and locks that one of those may hold for ever."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["PerProcess"]


T = TypeVar("T")


class PerProcess(Generic[T]):
    """Gives what `make` made in this process, to any thread of it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: dict[int, T] = {}

    def __call__(self) -> T:
        """The one of this process."""
        pid = os.getpid()
        # Of two threads that come first one makes something for nothing.
        return self._made[pid] if pid in self._made else self._made.setdefault(pid, self._make())
