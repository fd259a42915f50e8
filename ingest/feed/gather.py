"""How do row ids become tensors? By one gather per column, from blocks of contiguous columns into reused memory.

Blocks are mapped shards, or arrays in Ray's object store. No Python runs per row. Several threads may gather from the same
rows; they do so one after the other.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import ArrayLike, NDArray

from penstock.errors import PreflightError
from penstock.ingest.columns.arrays import Block
from penstock.ingest.columns.type_text import parse_type
from penstock.ingest.feed.lists import ImageDecoder, Packed, Places, bytes_at, places_of, take_lists
from penstock.ingest.feed.page_advice import read_ahead, read_randomly
from penstock.ingest.phases import phase
from penstock.ingest.schema import ColumnInfo
from penstock.ingest.shuffle.lanes import PartOf

__all__ = ["RowGather", "fixed_bytes"]

LONG_ROW = 1024
"""Bytes. On an AMD EPYC (Zen 4), touching rows before they are copied takes 0.77 of the time for 3 KiB, 1.1 for 512 bytes."""

TOUCHED_ROWS = 512
"""Rows touched before they are copied: fewer than the entries of the processor's TLB."""

_gathered_in: int | None = None
"""The process that has gathered rows last; another one where this was forked from it."""


class RowGather:
    """Rows in blocks, found by their ids.

    Args:
        columns: to gather.
        block_rows: rows of each block, in row order.
        open_block: returns block i as contiguous arrays [rows, *shape] of the columns' dtypes, or `Variable`; called when the
            block is first needed, and again after it was closed.
        block_bytes: size of each open block.
        max_open_bytes: above this, the blocks that were not used for longest are closed; None keeps all open.
        fetch: called with blocks that will be opened soon, and with `reset`: whether to discard those of earlier calls.
        ahead_rows: a caller should announce rows with `will_need` so many rows ahead; 0 for never.
        list_bytes: about the size of the lists of one row.
        beyond_memory: whether the blocks are mapped files that do not fit into memory and are not read in order.
    """

    def __init__(
        self,
        columns: Sequence[ColumnInfo],
        block_rows: ArrayLike,
        open_block: Callable[[int], Block],
        block_bytes: ArrayLike = (),
        max_open_bytes: int | None = None,
        fetch: Callable[[Iterable[int], bool], None] = lambda _blocks, _reset: None,
        ahead_rows: int = 0,
        list_bytes: int = 0,
        beyond_memory: bool = False,
    ) -> None:
        if _gathered_in not in (None, os.getpid()):
            torch.set_num_threads(1)  # a forked process waits for ever for the threads that torch had before
        self.columns = tuple(columns)
        sizes = np.asarray(block_rows, np.int64)
        self.num_rows = int(sizes.sum())
        self.row_bytes = list_bytes + fixed_bytes(self.columns)
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes
        self._block_of = PartOf(self._ends)
        self._open_block = open_block
        self._block_bytes = np.asarray(block_bytes)
        self._max_open_bytes = max_open_bytes
        self._fetch = fetch
        self.ahead_rows = ahead_rows
        self._beyond_memory = beyond_memory
        self._opened: dict[int, Block] = {}
        # Begin and end of each column of each block in memory, since the block was last opened.
        self._spans = {column.name: np.zeros((2, len(sizes)), np.int64) for column in self.columns}
        self._row_bytes = {column.name: fixed_bytes([column]) for column in self.columns}
        self._regions: dict[str, _Region] = {}
        self._memory = {column.name: _ReusedMemory(column) for column in self.columns if not column.varies}
        self._lists = [column for column in self.columns if column.ragged is not None]
        self._arrow = [column for column in self.columns if column.arrow is not None]
        self._images = [column for column in self.columns if column.encoded]
        self._decoder = ImageDecoder()
        self._lock = threading.RLock()

    def pin_memory(self, wanted: bool) -> None:
        """Choose whether to gather into pinned memory from now on, which a GPU can copy from asynchronously."""
        for memory in self._memory.values():
            memory.pinned = wanted

    def will_need(self, ids: NDArray[np.int64], reset: bool) -> None:
        """Prefetch the blocks and pages of rows that are gathered next, in this order.

        Args:
            reset: discard the previous prefetch plan.
        """
        blocks, first = np.unique(self._block_of(ids), return_index=True)
        with self._lock:
            self._fetch([int(block) for block in blocks[np.argsort(first)] if int(block) not in self._opened], reset)
            if self._beyond_memory:
                self._prefetch_pages(np.unique(ids))

    def _prefetch_pages(self, ids: NDArray[np.int64]) -> None:
        """Prefetch pages of all blocks, or, if blocks must be fetched first, of the open ones."""
        edges = np.searchsorted(ids, self._ends)
        begin = 0
        for index, end in enumerate(edges.tolist()):
            if end > begin and (index in self._opened or self._max_open_bytes is None):
                for view in self._block(index).values():
                    read_ahead(view, ids[begin:end] - self._starts[index])
            begin = end

    def column(self, name: str) -> NDArray[Any]:
        """Return all values of one fixed-shape column, [num_rows, *shape], in row order. Raises KeyError for an unknown one."""
        with self._lock:
            return np.concatenate([self._block(index)[name] for index in range(len(self._ends))])

    def take(self, ids: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Copy rows `ids` (each in [0, num_rows)) to tensors of shape [len(ids), *shape], in the columns' dtypes.

        The caller may keep and change the tensors. Their memory is reused once nothing refers to any part of it. Encoded images
        are decoded; columns of lists are left to `take_lists`.
        """
        global _gathered_in
        with self._lock, phase("gather"):
            _gathered_in = os.getpid()
            tensors = {name: memory.lend(len(ids)) for name, memory in self._memory.items()}
            if not len(ids):
                return tensors
            fixed = {name: tensor for name, tensor in tensors.items() if all(image.name != name for image in self._images)}
            self._take_fixed(ids, fixed)
            for image in self._images:
                places = self._places(image, ids)
                with phase("decode"):
                    self._decoder.decode(image, places, tensors[image.name])
            return tensors

    def take_lists(self, ids: NDArray[np.int64]) -> list[tuple[ColumnInfo, Packed]]:
        """Copy the columns of lists of rows `ids`."""
        if not len(ids):
            empty = np.zeros(1, np.int64)
            return [(c, Packed(torch.from_numpy(np.empty(0, np.dtype(c.dtype))), empty)) for c in self._lists]
        with self._lock, phase("gather"):
            return [(column, take_lists(self._places(column, ids))) for column in self._lists]

    def take_arrow(self, ids: NDArray[np.int64]) -> dict[str, pa.Array]:
        """Copy the columns that are not numbers of rows `ids`."""
        if not self._arrow:
            return {}
        taken: dict[str, list[pa.Array]] = {column.name: [] for column in self._arrow}
        with self._lock, phase("gather"):
            blocks = self._block_of(ids)
            by_block = np.argsort(blocks, kind="stable")
            for rows in np.split(by_block, np.flatnonzero(np.diff(blocks[by_block])) + 1) if len(ids) else ():
                index = int(blocks[rows[0]])
                views: Any = self._block(index)
                local = pa.array(ids[rows] - self._starts[index])
                for name, parts in taken.items():
                    parts.append(views[name].take(local))
            back = pa.array(np.argsort(by_block))
        if not len(ids):
            return {column.name: pa.array([], parse_type(str(column.arrow))) for column in self._arrow}
        return {name: parts[0] if len(parts) == 1 else pa.concat_arrays(parts).take(back) for name, parts in taken.items()}

    def lengths(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of entries of rows `ids` in a column of lists: int64, shape (n,) to (n,)."""
        column = next(column for column in self._lists if column.name == name)
        with self._lock:
            return self._places(column, ids).lengths

    def close_before(self, before: int) -> None:
        """Close the blocks whose rows are all before row `before`."""
        with self._lock:
            self.close([index for index in self._opened if self._ends[index] <= before])

    def close(self, blocks: Iterable[int]) -> None:
        """Close those of some blocks that are open."""
        with self._lock:
            for index in blocks:
                self._opened.pop(index, None)

    def _places(self, column: ColumnInfo, ids: NDArray[np.int64]) -> Places:
        blocks = self._block_of(ids)
        opened = {index: self._block(index) for index in _distinct(blocks).tolist()}
        views: Any = {index: block[column.name] for index, block in opened.items()}
        return places_of(views, column.dtype, blocks, ids - self._starts[blocks])._replace(held=list(opened.values()))

    def _take_fixed(self, ids: NDArray[np.int64], tensors: dict[str, torch.Tensor]) -> None:
        if len(self._ends) == 1:
            self._take_from(0, ids, tensors)
            return
        blocks = self._block_of(ids)
        first = int(blocks[0])
        if blocks[-1] == first and (blocks == first).all():  # reading in order, or inside one group
            self._take_from(first, ids - self._starts[first], tensors)
        else:
            self._take_scattered(ids, blocks, tensors)

    def _take_from(self, block: int, local: NDArray[np.int64], tensors: dict[str, torch.Tensor]) -> None:
        views: Any = self._block(block)
        for name, tensor in tensors.items():
            view, out, width = views[name], tensor.numpy(), self._row_bytes[name]
            for some in _touched_parts(view.reshape(-1).view(np.uint8), local * width, width):
                _take(view, local[some], out[some])

    def _take_scattered(self, ids: NDArray[np.int64], blocks: NDArray[np.int64], tensors: dict[str, torch.Tensor]) -> None:
        """Copy rows of many blocks in one pass: an address relative to the lowest block is the index of a row."""
        regions, held = self._regions, list[Block]()
        if self._max_open_bytes is None:
            if len(self._opened) < len(self._ends):  # at the begin, and of lanes, where others' are never opened
                for index in _distinct(blocks).tolist():
                    self._block(index)
            needed = np.array(list(self._opened))
        else:
            needed, regions = _distinct(blocks), {}
            with contextlib.suppress(PreflightError):
                held = [self._block(block) for block in needed.tolist()]  # until the copies are made
            if not held:
                self._take_by_block(ids, blocks, tensors)
                return
        for name, tensor in tensors.items():
            if name not in regions:
                regions[name] = _Region.over(self._spans[name][:, needed], needed, self._starts, self._row_bytes[name])
            regions[name].take(ids, blocks, tensor)
        del held

    def _take_by_block(self, ids: NDArray[np.int64], blocks: NDArray[np.int64], tensors: dict[str, torch.Tensor]) -> None:
        """Copy the rows block by block, if other runs' shards leave no room in the cache for all blocks at once."""
        for index in _distinct(blocks).tolist():
            rows = np.flatnonzero(blocks == index)
            block: Any = self._block(index)
            for name, tensor in tensors.items():
                tensor.numpy()[rows] = block[name][ids[rows] - self._starts[index]]
            del block

    def _block(self, index: int) -> Block:
        if index not in self._opened:
            block = self._open_or_make_room(index)
            self._regions.clear()
            for name, view in block.items():
                if isinstance(view, np.ndarray) and name in self._spans:
                    begin = view.ctypes.data
                    self._spans[name][:, index] = begin, begin + view.nbytes
            if self._beyond_memory:
                for view in block.values():
                    read_randomly(view)
            self._opened[index] = block  # last, so that an interrupt leaves no half-opened block
        if self._max_open_bytes is not None:
            self._opened[index] = self._opened.pop(index)  # to the end: most recently used
            while len(self._opened) > 1 and sum(self._block_bytes[each] for each in self._opened) > self._max_open_bytes:
                del self._opened[next(iter(self._opened))]
        return self._opened[index]

    def _open_or_make_room(self, index: int) -> Block:
        try:
            return self._open_block(index)
        except PreflightError:
            if self._max_open_bytes is None or not self._opened:
                raise
        # Other runs use the same cache: close the blocks that were kept for later.
        self._opened.clear()
        return self._open_block(index)


def fixed_bytes(columns: Iterable[ColumnInfo]) -> int:
    """Return about the gathered size of one row without its lists."""
    return sum(np.dtype(column.dtype).itemsize * int(np.prod(column.shape)) for column in columns)


def _take(view: NDArray[Any], rows: NDArray[np.int64], out: NDArray[Any]) -> None:
    # "clip" skips numpy's bounds check and the buffering that `out` would need for it; ids come from an Order.
    view.take(rows, axis=0, out=out, mode="clip")


def _touched_parts(memory: NDArray[np.uint8], at: NDArray[np.int64], row_bytes: int) -> Iterator[slice]:
    """Yield the rows to copy next: all at once if they are short, otherwise some hundred after reading one byte of each.

    The copy of a long row stalls until its page and first bytes arrive; reads of single bytes stall together.
    """
    if row_bytes < LONG_ROW:
        yield slice(None)
        return
    for begin in range(0, len(at), TOUCHED_ROWS):
        some = slice(begin, begin + TOUCHED_ROWS)
        memory.take(at[some], mode="clip")
        yield some


class _Region(NamedTuple):
    """The memory of one column of some blocks. The gaps between blocks are never read."""

    memory: NDArray[np.uint8]
    """From the begin of the lowest block to the end of the highest."""
    row_bytes: int
    row_0: NDArray[np.int64]
    """By block: the byte of `memory` where row 0 of the split would be, if all rows before the block were in front of it."""
    numbers: bool
    """Whether rows are single aligned numbers."""

    @classmethod
    def over(cls, spans: NDArray[np.int64], needed: NDArray[np.int64], starts: NDArray[np.int64], row_bytes: int) -> _Region:
        """Make the region of blocks `needed` with these begins and ends in memory (`spans`)."""
        first = int(spans[0].min())
        memory = bytes_at(first, int(spans[1].max()) - first)
        row_0 = np.zeros(len(starts), np.int64)
        row_0[needed] = spans[0] - first - starts[needed] * row_bytes
        aligned = row_bytes in (1, 2, 4, 8) and not (spans[0] % row_bytes).any()
        return cls(memory, row_bytes, row_0, aligned)

    def take(self, ids: NDArray[np.int64], blocks: NDArray[np.int64], tensor: torch.Tensor) -> None:
        """Copy rows `ids`, which are in `blocks`, to `tensor`."""
        width = self.row_bytes
        at = ids * width
        at += self.row_0.take(blocks)
        if self.numbers:
            at //= width
            kind = np.dtype(f"u{width}")
            _take(self.memory[: len(self.memory) // width * width].view(kind), at, tensor.numpy().reshape(-1).view(kind))
            return
        # Row i of this view is the `width` bytes from byte i on.
        rows_at = torch.from_numpy(self.memory).as_strided((len(self.memory) - width + 1, width), (1, 1))
        index, out = torch.from_numpy(at), tensor.view(torch.uint8).view(len(ids), width)
        for some in _touched_parts(self.memory, at, width):
            torch.index_select(rows_at, 0, index[some], out=out[some])


def _distinct(blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the blocks that occur, ascending. Counts from the lowest one on, for streams of many blocks."""
    first = blocks.min()
    return np.flatnonzero(np.bincount(blocks - first)) + first


class _ReusedMemory:
    """Memory for the gathered rows of one column. Reused memory is faster than fresh pages from the kernel."""

    KEPT = 4
    """Most free pieces kept: one in use, one being filled, two gathered ahead."""

    def __init__(self, column: ColumnInfo) -> None:
        self._column = column
        self._dtype = torch.from_numpy(np.empty(0, np.dtype(column.dtype))).dtype
        self.pinned = False
        self._free: list[NDArray[Any]] = []

    def lend(self, rows: int) -> torch.Tensor:
        """Return a tensor [rows, *shape] of arbitrary values."""
        if self.pinned:  # torch itself reuses pinned memory after the GPU's copies
            return torch.empty((rows, *self._column.shape), dtype=self._dtype, device="cpu", pin_memory=True)
        piece: NDArray[Any] | None = None
        while self._free and (piece is None or len(piece) < rows):
            piece = self._free.pop()
        if piece is None or len(piece) < rows:
            piece = np.empty((rows, *self._column.shape), np.dtype(self._column.dtype))
        lent = piece[:rows]
        # torch keeps the array alive as long as anything, in torch or in numpy, shares its memory.
        weakref.finalize(lent, self._take_back, piece).atexit = False
        return torch.from_numpy(lent)

    def _take_back(self, piece: NDArray[Any]) -> None:
        if len(self._free) < self.KEPT:
            self._free.append(piece)
