"""How does work that takes a while tell how far it is, without knowing who listens?"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Progress", "silent"]


class Progress(Protocol):
    """A callable that hears about progress; it must return at once and never raise."""

    def __call__(self, done: float, total: float | None, unit: str, note: str = "") -> None:
        """Report `done` of `total` (None when unknown) in `unit` (`rows`, `files`, `bytes`, `steps`)."""


def silent(done: float, total: float | None, unit: str, note: str = "") -> None:
    """A `Progress` that says nothing."""
