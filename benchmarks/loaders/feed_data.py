"""The rows every contender reads: generated once, the same for all. The label is the row's number, so that a lost row shows.

Only numpy is needed here: contenders with an environment of their own read this too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["CHUNK", "TABLES", "Rows", "arrays"]


CHUNK = 10_000
"""Rows that are generated at a time; each chunk has its own seed."""


@dataclass(frozen=True)
class Rows:
    """One benchmark's rows: `rows` times `x` (dtype, shape) and an int64 label."""

    name: str
    rows: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return np.dtype(self.dtype).itemsize * int(np.prod(self.shape)) + 8

    def chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(x, label) in row order, some thousand at a time."""
        for start in range(0, self.rows, CHUNK):
            count = min(CHUNK, self.rows - start)
            rng = np.random.default_rng([7, start])
            if self.dtype == "uint8":
                x = rng.integers(0, 256, (count, *self.shape), np.uint8)
            else:
                x = rng.standard_normal((count, *self.shape), np.float32)
            yield x, np.arange(start, start + count, dtype=np.int64)


TABLES = {"images": Rows("images", 200_000, "uint8", (32, 32, 3)), "table": Rows("table", 2_000_000, "float32", (28,))}


@functools.cache
def arrays(rows: Rows, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The rows as two memory-mapped arrays, written on the first call.

    Mapped once in a process: a map that is opened anew for each epoch is faulted in anew, page by page.
    """
    paths = folder / "x.npy", folder / "label.npy"
    if not paths[1].exists():
        folder.mkdir(parents=True, exist_ok=True)
        x = np.lib.format.open_memmap(paths[0], "w+", rows.dtype, (rows.rows, *rows.shape))
        label = np.lib.format.open_memmap(folder / "label.tmp", "w+", "int64", (rows.rows,))
        for values, numbers in rows.chunks():
            x[numbers[0] : numbers[-1] + 1] = values
            label[numbers[0] : numbers[-1] + 1] = numbers
        x.flush()
        label.flush()
        (folder / "label.tmp").rename(paths[1])
    return np.load(paths[0], mmap_mode="r"), np.load(paths[1], mmap_mode="r")
