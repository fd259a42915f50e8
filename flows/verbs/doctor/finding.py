"""What does the doctor say about one thing it looked at?"""

from __future__ import annotations

from typing import Literal

from penstock.config import Section
from penstock.redact import redact_text

__all__ = ["Finding", "fail", "ok", "warn"]


class Finding(Section):
    """One thing that was looked at. Its texts hold no secrets: the functions below hide those that stand in URLs."""

    name: str
    """The thing: a library, a server, a disk."""
    status: Literal["ok", "warn", "fail"]
    """`fail`: a run would not work. `warn`: it would, until something happens."""
    detail: str
    """What was found."""
    fix: str = ""
    """The next command or edit; empty if nothing needs to be done."""


def ok(name: str, detail: str) -> Finding:
    """All is well."""
    return Finding(name=name, status="ok", detail=redact_text(detail))


def warn(name: str, detail: str, fix: str) -> Finding:
    """A run works, until something happens."""
    return Finding(name=name, status="warn", detail=redact_text(detail), fix=redact_text(fix))


def fail(name: str, detail: str, fix: str) -> Finding:
    """A run would not work."""
    return Finding(name=name, status="fail", detail=redact_text(detail), fix=redact_text(fix))
