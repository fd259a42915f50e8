"""How does a list of row ids become tensors? One gather per column, straight from where the rows lie, into memory used again.

Rows lie in blocks (mapped shards, or arrays in Ray's object store) of contiguous columns. No Python runs per row.

Several iterators may read the same rows at once, each from a thread of its own: they gather one after the other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.errors import PreflightError
from penstock.ingest.columns.arrays import Block
from penstock.ingest.feed.lists import Packed
from penstock.ingest.feed.page_advice import read_ahead, read_randomly
from penstock.ingest.feed.per_process import PerProcess
from penstock.ingest.feed.variable_rows import ImageDecoder, Places, bytes_at, places_of, take_lists
from penstock.ingest.phases import phase
from penstock.ingest.schema import ColumnInfo

__all__ = ["RowGather", "fixed_bytes"]


BUCKETS_PER_BLOCK = 8
"""How finely rows are divided at least to find their blocks; each bucket is 8 bytes."""

LONG_ROW = 1024
"""Bytes. On an AMD EPYC (Zen 4) rows of 3 KiB take 0.77 of the time if they are touched before, of 512 bytes 1.1."""

TOUCHED_ROWS = 512
"""Rows touched before they are copied: fewer than the processor keeps the pages of."""

MAX_ENDS_INSIDE = 4
"""Where blocks differ so much that a bucket holds more ends than that, a binary search is as fast."""


class RowGather:
    """Rows spread over blocks, found by their number.

    Args:
        columns: what to gather.
        block_rows: rows of each block, in row order.
        open_block: gives block i as contiguous arrays [rows, *shape] of the columns' dtypes, or `Variable`; called when the
            block is first needed, and again after it was let go.
        block_bytes: what each block takes while it is open.
        max_open_bytes: blocks beyond so many of them are let go, those used longest ago first; None keeps all.
        fetch: called with blocks that will be opened soon, and with whether those of earlier calls will not.
        ahead_rows: how many rows before they are gathered a caller should say so with `will_need`; 0 for never.
        list_bytes: about what the lists of one row take.
        beyond_memory: whether the blocks are mapped files that do not fit into memory, and not read in order.
    """

    def __init__(
        self,
        columns: Sequence[ColumnInfo],
        block_rows: Sequence[int],
        open_block: Callable[[int], Block],
        block_bytes: Sequence[int] = (),
        max_open_bytes: int | None = None,
        fetch: Callable[[Iterable[int], bool], None] = lambda _blocks, _anew: None,
        ahead_rows: int = 0,
        list_bytes: int = 0,
        beyond_memory: bool = False,
    ) -> None:
        self.columns = tuple(columns)
        self.num_rows = sum(block_rows)
        self.row_bytes = list_bytes + fixed_bytes(self.columns)
        self._ends = np.cumsum(np.asarray(block_rows, np.int64))
        self._starts = self._ends - np.asarray(block_rows, np.int64)
        self._block_of = _BlockOf(self._ends)
        self._open_block = open_block
        self._block_bytes = block_bytes
        self._max_open_bytes = max_open_bytes
        self._fetch = fetch
        self.ahead_rows = ahead_rows
        self._beyond_memory = beyond_memory
        self._opened: dict[int, Block] = {}
        # Where each column of each block begins and ends in memory, as of when the block was opened last.
        self._spans = {column.name: np.zeros((2, len(block_rows)), np.int64) for column in self.columns}
        self._row_bytes = {column.name: fixed_bytes([column]) for column in self.columns}
        self._regions: dict[str, _Region] = {}
        self._memory = {column.name: _Memory(column) for column in self.columns if column.ragged is None}
        self._lists = [column for column in self.columns if column.ragged is not None]
        self._images = [column for column in self.columns if column.encoded]
        self._decoder = ImageDecoder()
        self._alone = PerProcess(threading.RLock)

    def pin_memory(self, wanted: bool) -> None:
        """Gather into pinned memory from now on, which a GPU copies from by itself, or not."""
        for memory in self._memory.values():
            memory.pinned = wanted

    def will_need(self, ids: NDArray[np.int64], anew: bool) -> None:
        """Say which rows are gathered next, in order, so that their blocks and pages can be brought near meanwhile.

        Args:
            anew: forget what was said before.
        """
        blocks, first = np.unique(self._block_of(ids), return_index=True)
        with self._alone():
            self._fetch([int(block) for block in blocks[np.argsort(first)] if int(block) not in self._opened], anew)
            if self._beyond_memory:
                self._read_ahead(np.unique(ids))

    def _read_ahead(self, ids: NDArray[np.int64]) -> None:
        """Bring pages near: of all blocks, or of those that are open where blocks must arrive first."""
        edges = np.searchsorted(ids, self._ends)
        begin = 0
        for index, end in enumerate(edges.tolist()):
            if end > begin and (index in self._opened or self._max_open_bytes is None):
                for view in self._block(index).values():
                    read_ahead(view, ids[begin:end] - self._starts[index])
            begin = end

    def column(self, name: str) -> NDArray[Any]:
        """All values of one fixed-shape column, [num_rows, *shape], in row order. Raises KeyError if there is none."""
        with self._alone():
            return np.concatenate([self._block(index)[name] for index in range(len(self._ends))])

    def take(self, ids: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Copy rows `ids` (each in [0, num_rows)) to tensors of shape [len(ids), *shape], in the columns' dtypes.

        The tensors are the caller's to keep and to change. Their memory is used again when no part of it is held any more.
        Encoded images are decoded; columns of lists are left to `take_lists`.
        """
        with self._alone(), phase("gather"):
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
        """The columns of lists of rows `ids`; their tensors are the caller's."""
        if not len(ids):
            empty = np.zeros(1, np.int64)
            return [(c, Packed(torch.from_numpy(np.empty(0, np.dtype(c.dtype))), empty)) for c in self._lists]
        with self._alone(), phase("gather"):
            return [(column, take_lists(self._places(column, ids))) for column in self._lists]

    def lengths(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many entries rows `ids` have in a column of lists: int64, shape (n,) to (n,)."""
        column = next(column for column in self._lists if column.name == name)
        with self._alone():
            return self._places(column, ids).lengths

    def let_go(self, before: int) -> None:
        """Close blocks of which all rows lie before row `before`, which are not gathered any more."""
        with self._alone():
            for index in [index for index in self._opened if self._ends[index] <= before]:
                del self._opened[index]

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
            for some in _as_touched(view.reshape(-1).view(np.uint8), local * width, width):
                _take(view, local[some], out[some])

    def _take_scattered(self, ids: NDArray[np.int64], blocks: NDArray[np.int64], tensors: dict[str, torch.Tensor]) -> None:
        """Copy each row in one pass from wherever it lies: in one address space, an address is an index."""
        if self._max_open_bytes is None and len(self._opened) == len(self._ends):
            needed, regions, held = np.arange(len(self._ends)), self._regions, []
        else:
            needed, regions = _distinct(blocks), {}
            try:
                held = [self._block(block) for block in needed.tolist()]  # until the copies are made
            except PreflightError:
                if self._max_open_bytes is None:
                    raise
                held = []
            if not held:
                self._take_by_block(ids, blocks, tensors)
                return
        for name, tensor in tensors.items():
            if name not in regions:
                regions[name] = _Region.over(self._spans[name][:, needed], needed, self._starts, self._row_bytes[name])
            regions[name].take(ids, blocks, tensor)
        del held

    def _take_by_block(self, ids: NDArray[np.int64], blocks: NDArray[np.int64], tensors: dict[str, torch.Tensor]) -> None:
        """Copy the rows of one block after the other: another run's shards leave no room for all of them at once."""
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
            self._opened[index] = block  # last: an interrupt must not leave one that seems open and is nowhere
        if self._max_open_bytes is not None:
            self._opened[index] = self._opened.pop(index)  # to the end: used last
            while len(self._opened) > 1 and self._open_bytes() > self._max_open_bytes:
                del self._opened[next(iter(self._opened))]
        return self._opened[index]

    def _open_or_make_room(self, index: int) -> Block:
        try:
            return self._open_block(index)
        except PreflightError:
            if self._max_open_bytes is None or not self._opened:
                raise
        # Other runs read through the same cache: what is kept open for later goes first.
        self._opened.clear()
        return self._open_block(index)

    def _open_bytes(self) -> int:
        return sum(self._block_bytes[index] for index in self._opened)


def fixed_bytes(columns: Iterable[ColumnInfo]) -> int:
    """About what one row takes once it is gathered, whatever its lists hold."""
    return sum(np.dtype(column.dtype).itemsize * int(np.prod(column.shape)) for column in columns)


def _take(view: NDArray[Any], rows: NDArray[np.int64], out: NDArray[Any]) -> None:
    # "clip" skips numpy's bounds check and the buffering that `out` would need with it; ids come from an Order.
    view.take(rows, axis=0, out=out, mode="clip")


def _as_touched(memory: NDArray[np.uint8], at: NDArray[np.int64], row_bytes: int) -> Iterator[slice]:
    """Which rows to copy next: all at once where they are short, else some hundred, of each of which a byte was just read.

    A copy of a long row waits for its page and its first bytes to be found. Bytes alone are waited for many at a time.
    """
    if row_bytes < LONG_ROW:
        yield slice(None)
        return
    for begin in range(0, len(at), TOUCHED_ROWS):
        some = slice(begin, begin + TOUCHED_ROWS)
        memory.take(at[some], mode="clip")
        yield some


class _Region(NamedTuple):
    """Where in memory one column of some blocks lies. What lies between the blocks is never read."""

    memory: NDArray[np.uint8]
    """From the first block's begin to the last one's end."""
    row_bytes: int
    row_0: NDArray[np.int64]
    """By block: the byte of `memory` at which the first row of all would be, if the blocks before were as long as they are."""
    numbers: bool
    """Whether rows are single numbers, all of them aligned."""

    @classmethod
    def over(cls, spans: NDArray[np.int64], needed: NDArray[np.int64], starts: NDArray[np.int64], row_bytes: int) -> _Region:
        """The region of blocks `needed`, whose begins and ends in memory are `spans`."""
        first = int(spans[0].min())
        memory = bytes_at(first, int(spans[1].max()) - first)
        row_0 = np.zeros(len(starts), np.int64)
        row_0[needed] = spans[0] - first - starts[needed] * row_bytes
        aligned = row_bytes in (1, 2, 4, 8) and not (spans[0] % row_bytes).any()
        return cls(memory, row_bytes, row_0, aligned)

    def take(self, ids: NDArray[np.int64], blocks: NDArray[np.int64], tensor: torch.Tensor) -> None:
        """Copy rows `ids`, which are in `blocks`, to a tensor of as many."""
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
        for some in _as_touched(self.memory, at, width):
            torch.index_select(rows_at, 0, index[some], out=out[some])


class _BlockOf:
    """In which block is a row? For the first row of every bucket of rows a table says it; ends inside of a bucket are counted.

    Args:
        ends: rows up to the end of each block, ascending.
    """

    def __init__(self, ends: NDArray[np.int64]) -> None:
        self._ends = ends
        rows = int(ends.max(initial=0))
        self._shift = max(0, (rows // (BUCKETS_PER_BLOCK * max(1, len(ends)))).bit_length() - 1)
        firsts = np.arange(0, rows, 1 << self._shift)
        self._table = ends.searchsorted(firsts, side="right")
        last = ends.searchsorted(np.minimum(firsts + (1 << self._shift), rows) - 1, side="right")
        self._ends_inside = int((last - self._table).max(initial=0))

    def __call__(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The block of each row: int64, shape (n,) to (n,)."""
        if self._ends_inside > MAX_ENDS_INSIDE:
            return self._ends.searchsorted(ids, side="right")
        blocks = self._table.take(ids >> self._shift)
        for _ in range(self._ends_inside):
            blocks += ids >= self._ends.take(blocks)
        return blocks


def _distinct(blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The blocks that occur, ascending. Of a stream's many a batch needs neighbours: those before them cost nothing."""
    first = blocks.min()
    return np.flatnonzero(np.bincount(blocks - first)) + first


class _Memory:
    """Where one column's rows are gathered to. Memory that was written before is faster than fresh pages of the kernel."""

    KEPT = 4
    """Pieces kept for later: one in use, one being filled, two gathered ahead."""

    def __init__(self, column: ColumnInfo) -> None:
        self._column = column
        self._dtype = torch.from_numpy(np.empty(0, np.dtype(column.dtype))).dtype
        self.pinned = False
        self._free: list[NDArray[Any]] = []

    def lend(self, rows: int) -> torch.Tensor:
        """A tensor [rows, *shape] of arbitrary values."""
        if self.pinned:  # torch keeps such memory for later itself, until the GPU's copies from it are done
            return torch.empty((rows, *self._column.shape), dtype=self._dtype, device="cpu", pin_memory=True)
        piece: NDArray[Any] | None = None
        while self._free and (piece is None or len(piece) < rows):
            piece = self._free.pop()
        if piece is None or len(piece) < rows:
            piece = np.empty((rows, *self._column.shape), np.dtype(self._column.dtype))
        lent = piece[:rows]
        # torch holds the array a tensor was made of for as long as anything, in torch or in numpy, shares its memory.
        weakref.finalize(lent, self._take_back, piece).atexit = False
        return torch.from_numpy(lent)

    def _take_back(self, piece: NDArray[Any]) -> None:
        if len(self._free) < self.KEPT:
            self._free.append(piece)
