"""Where does the memory of a batch go when the next one needs as much? Kept in the process, where glibc would give it back."""

from __future__ import annotations

import ctypes
import functools
import sys

__all__ = ["keep_freed_memory"]


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""

KEPT_BYTES = 64 << 20

OWN_MAPPING_BYTES = 32 << 20
"""The most that glibc takes; larger arrays come from the system and go back to it."""


@functools.cache
def keep_freed_memory() -> None:
    """Let this process keep up to `KEPT_BYTES` of freed memory from now on, for each thread; without glibc nothing changes.

    Arrays of some megabytes are otherwise mapped and cleared by the system anew for every batch, a tenth of the time that
    preparing rows takes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
