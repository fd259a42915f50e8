"""What does a feed yield, and which rows of a global batch does each rank get?

Rank r of W takes the contiguous part [r*b//W, (r+1)*b//W) of a global batch of b rows, or, where rows are dealt to lanes
(ingest/shuffle/lanes.py), the rows of lanes [r*lanes//W, (r+1)*lanes//W). If there are more ranks than lanes, it takes its part
of the batch's rows put in the order of their lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, Required, TypedDict, get_args

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from penstock.errors import SpecError
from penstock.ingest.shuffle.lanes import lanes_of
from penstock.ingest.shuffle.row_generator import RowGenerator

__all__ = ["Augment", "Batch", "FeedShare", "LastBatch", "ShareArguments", "own_positions", "share"]

LastBatch = Literal["keep", "drop", "fill"]
"""`keep` makes the last global batch shorter, `drop` leaves its rows out of the epoch, `fill` adds the epoch's first rows."""

Augment = Callable[[dict[str, torch.Tensor], RowGenerator], Mapping[str, torch.Tensor]]
"""Changes the columns of one batch, with random numbers of its rows."""


class Batch(NamedTuple):
    """One rank's share of a global batch. The caller may keep and change the tensors."""

    columns: dict[str, torch.Tensor]
    """Column name to tensor [rows, *shape], in the stored dtype; lists as in `ColumnInfo.ragged`."""
    row_ids: NDArray[np.int64]
    """Shape [rows]: number of each row in its split."""
    rows: int
    """Rows of this rank's share; may be 0 if the global batch is smaller than the world."""
    global_rows: int
    """Rows of the global batch."""
    first_row: int
    """Position in the epoch of this share's first row."""
    position: int
    """Rows consumed by all ranks in this epoch after this batch."""
    arrow: Mapping[str, pa.Array] = MappingProxyType({})
    """Columns that are not numbers, which stay on the CPU."""


class ShareArguments(TypedDict, total=False):
    """Keyword arguments of the fields of `FeedShare`."""

    batch_rows: Required[int]
    rank: int
    world_size: int
    prefetch: int
    last: LastBatch
    lanes: int


class FeedShare(NamedTuple):
    """The part of every global batch that one rank reads, and how far ahead it reads."""

    batch_rows: int
    """Rows of the global batch."""
    rank: int = 0
    world_size: int = 1
    prefetch: int = 2
    """Groups of batches made ahead in a thread (for mere copies of rows, once that saves time); 0 uses no thread."""
    last: LastBatch = "keep"
    """Treatment of an epoch's last global batch if the rows do not fill it."""
    lanes: int = 1
    """Of the order."""

    def checked(self) -> FeedShare:
        """Return self. Raises ValueError for an invalid field."""
        for name, least in (("batch_rows", 1), ("world_size", 1), ("rank", 0), ("prefetch", 0)):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
        if self.rank >= self.world_size:
            raise ValueError(f"rank={self.rank} must be below world_size={self.world_size}")
        if self.last not in get_args(LastBatch):
            raise ValueError(f"last={self.last!r} must be one of {', '.join(get_args(LastBatch))}")
        return self

    def lane_positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the positions of [start, stop) in lanes that this rank reads from: int64, ascending."""
        if self.world_size == 1:
            return np.arange(start, stop)
        of_lanes = np.arange(*lanes_of(self.rank, self.world_size, self.lanes))
        rounds = np.arange(start // self.lanes, -(-stop // self.lanes))
        positions = (rounds[:, None] * self.lanes + of_lanes).reshape(-1)
        return positions[slice(*positions.searchsorted([start, stop]))]

    def positions(self, epoch_rows: int) -> int:
        """Return the positions of an epoch of so many rows: fewer with `drop`, more with `fill`. Raises SpecError for 0."""
        if self.last == "keep" or epoch_rows % self.batch_rows == 0:
            return epoch_rows
        if self.last == "drop" and epoch_rows < self.batch_rows:
            raise SpecError(
                f"{epoch_rows} rows do not fill one batch of {self.batch_rows}, and train.last_batch drops a shorter one",
                next_step=f"use batches of at most {epoch_rows} rows, or train.last_batch: keep",
            )
        return (epoch_rows // self.batch_rows + (self.last == "fill")) * self.batch_rows


def share(global_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the contiguous part [low, high) of a global batch that belongs to `rank`."""
    return rank * global_rows // world_size, (rank + 1) * global_rows // world_size


def own_positions(part: FeedShare, cuts: Sequence[tuple[int, int]]) -> list[NDArray[np.int64]]:
    """Return one rank's positions in global batches that follow each other, given by (first, end): int64, ascending."""
    rank, world_size, lanes = part.rank, part.world_size, part.lanes
    if lanes == 1:
        return [begin + np.arange(*share(stop - begin, rank, world_size)) for begin, stop in cuts]
    if world_size <= lanes:
        own = part.lane_positions(cuts[0][0], cuts[-1][1])
        return np.split(own, own.searchsorted([begin for begin, _ in cuts[1:]]))
    by_lane = [begin + np.argsort(np.arange(begin, stop) % lanes, kind="stable") for begin, stop in cuts]
    return [np.sort(positions[slice(*share(len(positions), rank, world_size))]) for positions in by_lane]
