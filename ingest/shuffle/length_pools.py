"""Which rows make a step if they differ in length? Rows of like length, or rows with a given number of entries together.

The positions of an epoch are cut into pools of `pool_batches * batch_rows`. The rows of a pool are put into steps, and the
steps into random order. Both follow from the order and the rows' lengths alone, so that a position is the whole state, on any
number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SpecError
from penstock.ingest.schema import ColumnInfo
from penstock.ingest.shuffle.permutation import Permutation
from penstock.ingest.spec import LengthSpec
from penstock.ingest.splitmix import hash_words

__all__ = ["Pools", "find_column"]

Ids = NDArray[np.int64]

_POOL = 4  # purpose of the permutation, part of its key; ingest/shuffle/order.py has the others


class _Pool(NamedTuple):
    """The steps of one pool."""

    ids: Ids
    """Row ids in reading order."""
    ends: Ids
    """End of each step, counted from the pool's begin."""


class Pools:
    """The steps of every epoch. Pool n holds the positions from `n * pool_rows` on.

    Args:
        spec: the section `shuffle.by_length`.
        column: of lists. In padded batches a row costs as much as the longest row of its step.
        seed: of the order.
        epoch_rows: positions of an epoch.
        batch_rows: most rows of a step.
        ids_at: (epoch, positions) -> row ids, before rows are put into steps.
        lengths: row ids -> entries of these rows.
    """

    def __init__(
        self,
        spec: LengthSpec,
        column: ColumnInfo,
        seed: int,
        epoch_rows: int,
        batch_rows: int,
        ids_at: Callable[[int, Ids], Ids],
        lengths: Callable[[Ids], Ids],
    ) -> None:
        self._padded = column.ragged == "padded"
        self._most = spec.batch_entries
        self._seed, self._epoch_rows, self._batch_rows = seed, epoch_rows, batch_rows
        self.pool_rows = spec.pool_batches * batch_rows
        self._unpooled_ids_at, self._lengths = ids_at, lengths
        self._pool = functools.lru_cache(maxsize=2)(self._make)

    def steps(self, epoch: int, start: int) -> Iterator[tuple[int, int]]:
        """Yield (first position, position after the last) of each step of an epoch, from position `start` on."""
        for number in range(start // self.pool_rows, -(-self._epoch_rows // self.pool_rows)):
            first = number * self.pool_rows
            for end in (first + self._pool(epoch, number).ends).tolist():
                if end > start:
                    yield start, end
                    start = end

    def ids_at(self, epoch: int, positions: Ids) -> Ids:
        """Return row ids at ascending `positions` of an epoch: int64, shape (n,) to (n,)."""
        numbers = positions // self.pool_rows
        edges = np.flatnonzero(np.diff(numbers)) + 1
        parts = [
            self._pool(epoch, int(part[0]) // self.pool_rows).ids[part % self.pool_rows]
            for part in np.split(positions, edges)
            if len(part)
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _make(self, epoch: int, number: int) -> _Pool:
        first = number * self.pool_rows
        ids = self._unpooled_ids_at(epoch, np.arange(first, min(first + self.pool_rows, self._epoch_rows)))
        lengths = self._lengths(ids)
        # Only padded rows gain from neighbours of like length.
        by_length = np.argsort(lengths, kind="stable") if self._padded else np.arange(len(ids))
        steps = np.split(by_length, self._cut(lengths[by_length]))
        shuffled = Permutation(len(steps), hash_words(self._seed, epoch, _POOL, number))(np.arange(len(steps))).tolist()
        # Inside a step rows keep their order, so that no rank gets all the long ones.
        rows = [np.sort(steps[step]) for step in shuffled]
        return _Pool(ids[np.concatenate(rows)], np.cumsum([len(part) for part in rows]))

    def _cut(self, lengths: Ids) -> list[int]:
        """Return the begins of all steps but the first."""
        count, most = len(lengths), self._most
        if most is None:
            return list(range(self._batch_rows, count, self._batch_rows))
        ends = np.cumsum(lengths)
        cuts, begin = [], 0
        while begin < count:
            upto = min(begin + self._batch_rows, count)
            if self._padded:
                cost = lengths[begin:upto] * np.arange(1, upto - begin + 1)
            else:
                cost = ends[begin:upto] - (ends[begin - 1] if begin else 0)
            begin += max(1, int(np.searchsorted(cost, most, side="right")))
            cuts.append(begin)
        return cuts[:-1]


def find_column(spec: LengthSpec, columns: Sequence[ColumnInfo]) -> ColumnInfo:
    """Find the column of lists that `spec` names. Raises SpecError if it is not among `columns`, which are read."""
    found = next((column for column in columns if column.name == spec.column and column.ragged is not None), None)
    if found is None:
        raise SpecError(
            f"shuffle.by_length: {spec.column!r} is not a column of lists",
            problems=[f"columns: {', '.join(map(str, columns))}"],
            next_step="name a column that the transform `ragged` makes and that is read",
        )
    return found
