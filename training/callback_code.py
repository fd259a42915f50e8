"""What is an entry of `train.callbacks` to a worker? Plain data that pickles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.usercode.capture import UserCode

__all__ = ["CallbackCode"]


@dataclass(frozen=True)
class CallbackCode:
    """One entry of `train.callbacks`."""

    name: str
    """Of one of penstock's own or of a package's, or `file.py:Name`."""
    params: dict[str, Any]
    code: UserCode | None = None
    """Of `file.py:Name`."""
