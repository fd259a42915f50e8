"""How are mapped shards read that do not fit into memory? With advice to the kernel which pages are read next.

Without it the kernel reads 128 KB around every row and evicts pages that are needed next: some hundred rows a second, where the
disk delivers tens of thousands (benchmarks/beyond.py).
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
from numpy.typing import NDArray

from penstock.ingest.columns.extension_types import Variable

__all__ = ["free_memory", "read_ahead", "read_randomly"]

_PAGE = mmap.PAGESIZE

_libc = ctypes.CDLL(None)

_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def free_memory(proc: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes for pages of files: the machine's available memory, or the limit of this process's cgroup.

    Args:
        proc: file with this process's cgroups, of version 1 or 2.
        groups: mount point of the cgroups.
    """
    free = psutil.virtual_memory().available
    try:
        lines = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:  # not Linux
        return free
    for _, controllers, path in lines:
        if controllers and "memory" not in controllers.split(","):
            continue
        home, name = (groups / "memory", "memory.limit_in_bytes") if controllers else (groups, "memory.max")
        own = home / path.strip("/")
        # Inside a container the path may be that of the host; the group's own files are then at the mount point.
        for folder in (own, *own.parents):
            if folder.is_relative_to(home) and (folder / name).is_file():
                limit = (folder / name).read_text().strip()
                free = min(free, int(limit)) if limit.isdigit() else free
    return free


def read_randomly(view: np.ndarray | Variable | pa.Array) -> None:
    """Make the kernel read only the requested pages of a mapped column, without those around them."""
    if isinstance(view, pa.Array):
        return
    values = view.values if isinstance(view, Variable) else view
    _advise(values.ctypes.data, values.nbytes, mmap.MADV_RANDOM)


def read_ahead(view: np.ndarray | Variable | pa.Array, rows: NDArray[np.int64]) -> None:
    """Start to read the pages of ascending `rows` of a mapped column of numbers; returns before they are read."""
    if isinstance(view, pa.Array):
        return
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
    # Failed advice only costs time, so the result is ignored.
    if size:
        start = address - address % _PAGE
        _libc.madvise(start, address + size - start, advice)
