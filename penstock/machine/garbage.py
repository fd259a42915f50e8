"""When does Python look for garbage? In a process of ours rarely, and not once more at its end.

Torch, Ray, Prefect and MLflow are a million objects that stay. Looking through them again and again while they are loaded
takes a quarter of that time, and once more at the end of the process as long: of `penstock run` 2.5 s of the 6.5 s that its
own process works before and after the flow.
"""

from __future__ import annotations

import atexit
import gc

__all__ = ["collect_rarely"]


_NEW_OBJECTS = 500_000
"""Containers made and not yet freed before Python looks; its default is 700."""


def collect_rarely() -> None:
    """Let this process collect garbage rarely, and end without looking through what it has loaded."""
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
    atexit.register(gc.freeze)
