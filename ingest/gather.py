"""How does a list of row ids become tensors? One numpy take per column and block, into memory that torch owns.

Rows lie in blocks (mapped shards, or arrays in Ray's object store) of contiguous fixed-shape columns. No Python runs per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ingest.dataset import ColumnInfo

__all__ = ["Rows", "empty_tensors"]

Block = Mapping[str, np.ndarray]


class Rows:
    """Rows spread over blocks, found by their number.

    Args:
        columns: what to gather.
        block_rows: rows of each block, in row order.
        open_block: gives block i as arrays [rows, *shape] of the columns' dtypes; called when the block is first needed, and
            again after it was let go.
        block_bytes: what each block takes while it is open.
        max_open_bytes: blocks beyond so many of them are let go, those used longest ago first; None keeps all.
        fetch: told of blocks that will be opened soon.
        ahead_rows: how many rows before they are gathered a caller should say so with `will_need`; 0 for never.
    """

    def __init__(
        self,
        columns: Sequence[ColumnInfo],
        block_rows: Sequence[int],
        open_block: Callable[[int], Block],
        block_bytes: Sequence[int] = (),
        max_open_bytes: int | None = None,
        fetch: Callable[[Iterable[int]], None] = lambda _blocks: None,
        ahead_rows: int = 0,
    ) -> None:
        self.columns = tuple(columns)
        self.num_rows = sum(block_rows)
        self.row_bytes = sum(np.dtype(c.dtype).itemsize * int(np.prod(c.shape)) for c in self.columns)
        self._ends = np.cumsum(np.asarray(block_rows, np.int64))
        self._starts = self._ends - np.asarray(block_rows, np.int64)
        self._open_block = open_block
        self._block_bytes = block_bytes
        self._max_open_bytes = max_open_bytes
        self._fetch = fetch
        self.ahead_rows = ahead_rows
        self._opened: dict[int, Block] = {}

    def will_need(self, ids: NDArray[np.int64]) -> None:
        """Say which rows are gathered next, in order, so that their blocks can be brought near meanwhile."""
        blocks, first = np.unique(np.searchsorted(self._ends, ids, side="right"), return_index=True)
        self._fetch(int(block) for block in blocks[np.argsort(first)] if int(block) not in self._opened)

    def take(self, ids: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Copy rows `ids` (each in [0, num_rows)) to fresh tensors of shape [len(ids), *shape], in the columns' dtypes."""
        tensors = empty_tensors(self.columns, len(ids))
        if not len(ids):
            return tensors
        if len(self._ends) == 1:
            self._take_from(0, ids, tensors)
            return tensors
        blocks = np.searchsorted(self._ends, ids, side="right")
        first = int(blocks[0])
        if (blocks == first).all():  # reading in order, or inside one group
            self._take_from(first, ids - self._starts[first], tensors)
            return tensors
        self._take_scattered(ids, blocks, tensors)
        return tensors

    def _take_from(self, block: int, local: NDArray[np.int64], tensors: dict[str, torch.Tensor]) -> None:
        views = self._block(block)
        for name, tensor in tensors.items():
            # "clip" skips numpy's bounds check and the buffering that `out` would need with it; ids come from an Order.
            views[name].take(local, axis=0, out=tensor.numpy(), mode="clip")

    def _take_scattered(self, ids: NDArray[np.int64], blocks: NDArray[np.int64], tensors: dict[str, torch.Tensor]) -> None:
        """Gather block by block into a scratch array, then put the rows in order: a second copy, but one within the cache."""
        by_block = np.argsort(blocks.astype(np.uint16) if len(self._ends) < 1 << 16 else blocks, kind="stable")
        place = np.empty_like(by_block)
        place[by_block] = np.arange(len(ids))
        present, begins = np.unique(blocks[by_block], return_index=True)
        runs = list(zip(present.tolist(), begins.tolist(), [*begins[1:].tolist(), len(ids)], strict=True))
        local = ids[by_block] - self._starts[blocks[by_block]]
        for name, tensor in tensors.items():
            out = tensor.numpy()
            scratch = np.empty_like(out)
            for block, begin, end in runs:
                self._block(block)[name].take(local[begin:end], axis=0, out=scratch[begin:end], mode="clip")
            scratch.take(place, axis=0, out=out, mode="clip")

    def _block(self, index: int) -> Block:
        if index not in self._opened:
            self._opened[index] = self._open_block(index)
        if self._max_open_bytes is not None:
            self._opened[index] = self._opened.pop(index)  # to the end: used last
            while len(self._opened) > 1 and self._open_bytes() > self._max_open_bytes:
                del self._opened[next(iter(self._opened))]
        return self._opened[index]

    def _open_bytes(self) -> int:
        return sum(self._block_bytes[index] for index in self._opened)


def empty_tensors(columns: Sequence[ColumnInfo], rows: int) -> dict[str, torch.Tensor]:
    """Uninitialised tensors [rows, *shape], one per column."""
    return {c.name: torch.empty((rows, *c.shape), dtype=_torch_dtype(c.dtype)) for c in columns}


def _torch_dtype(name: str) -> torch.dtype:
    return torch.from_numpy(np.empty(0, np.dtype(name))).dtype
