"""How are mapped shards read that do not fit into memory? The kernel gets advice which pages come next.

Left alone it reads 128 KB around every row, pushes out what is needed next, and delivers some hundred rows a second where the
disk has tens of thousands (benchmarks/beyond.py).
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from penstock.ingest.columns.extension_types import Variable

__all__ = ["free_memory", "read_ahead", "read_randomly"]


_PAGE = mmap.PAGESIZE

_libc = ctypes.CDLL(None)

_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def free_memory(proc: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes there are for pages of files: what the machine has available, or what this process's cgroup may have at most.

    Args:
        proc: names this process's cgroups, of version 1 or 2.
        groups: where they are mounted.
    """
    free = psutil.virtual_memory().available
    try:
        lines = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:  # no Linux
        return free
    for _, controllers, path in lines:
        if controllers == "":
            home, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            home, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be that of the host; the group's own files are then at the top.
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            try:
                limit = home.joinpath(*parts[:depth], name).read_text().strip()
            except OSError:
                continue
            free = min(free, int(limit)) if limit.isdigit() else free
    return free


def read_randomly(view: np.ndarray | Variable) -> None:
    """Say that a mapped column is read here and there: the kernel then reads the pages that are asked for, and no others."""
    values = view.values if isinstance(view, Variable) else view
    _advise(values.ctypes.data, values.nbytes, mmap.MADV_RANDOM)


def read_ahead(view: np.ndarray | Variable, rows: NDArray[np.int64]) -> None:
    """Begin to read the pages of ascending `rows` of a mapped column; returns before they are there."""
    if isinstance(view, Variable):
        itemsize = view.values.itemsize
        begins, ends = view.offsets[rows] * itemsize, view.offsets[rows + 1] * itemsize
        address = view.values.ctypes.data
    else:
        row_bytes = view.nbytes // len(view)
        begins, ends, address = rows * row_bytes, (rows + 1) * row_bytes, view.ctypes.data
    first = np.flatnonzero(np.concatenate([[True], begins[1:] > ends[:-1] + _PAGE]))
    last = np.concatenate([first[1:] - 1, [len(rows) - 1]])
    for begin, end in zip(begins[first].tolist(), ends[last].tolist(), strict=True):
        _advise(address + begin, end - begin, mmap.MADV_WILLNEED)


def _advise(address: int, size: int, advice: int) -> None:
    # Advice that is not taken costs time and nothing else, so the answer is not looked at.
    if size:
        start = address - address % _PAGE
        _libc.madvise(start, address + size - start, advice)
