"""How does work that takes a while report its progress, without knowing its listener, and what it waits for?"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Protocol

__all__ = ["Progress", "announce_wait", "in_notebook", "silent"]

_SILENCE_S = 2.0


class Progress(Protocol):
    """A callable that receives progress; it must return at once and never raise."""

    def __call__(self, done: float, total: float | None, unit: str, note: str = "") -> None:
        """Report `done` of `total` (None when unknown) in `unit` (`rows`, `files`, `bytes`, `steps`)."""


def silent(done: float, total: float | None, unit: str, note: str = "") -> None:
    """Do nothing; a `Progress`."""


@contextlib.contextmanager
def announce_wait(what: str) -> Iterator[None]:
    """Print a line to stderr if the block takes more than two seconds: silence looks like a command that hangs."""
    timer = threading.Timer(_SILENCE_S, lambda: print(f"  waiting for {what}", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")
