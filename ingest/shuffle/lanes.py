"""Which part of the rows does a worker read, so that each machine fetches its own shards only, and batches mix all of them?

The seed deals the shards, in the same way for every epoch: they are put into a random order on a line, which is cut into
`lanes` stretches whose rows differ by at most one. Every lane has an order of its own in every epoch. Position p of an epoch
belongs to lane p % lanes and is that lane's row number p // lanes: each batch has rows of every lane, and each worker serves
some lanes in every batch. A batch does not depend on the number of workers.

All lanes look up the tables of one network (ingest/shuffle/permutation.py), and each adds keys of its own to what it looks up:
one call computes the rows of all lanes, about 13 ns a row, and nothing is stored by row but windows
of at most 512 rows a lane.
Source: the lines of samples of mosaicml/streaming and the splits of lance, without their fixed numbers of nodes; S. Chen and
J. Steinberger, "Tight security bounds for key-alternating ciphers", 2014, for public tables with keys. Own code.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.ingest.shuffle.permutation import ROUNDS, SMALL, Half, Permutation, table
from penstock.ingest.splitmix import GOLDEN, hash_words, mix_words

__all__ = ["PARTS_MOST", "LaneRows", "PartOf", "lanes_of"]

Ids = NDArray[np.int64]

PARTS_MOST = 1 << 20
"""Most runs of rows that windows of rows are made of; above that the runs get longer."""

_DEAL, _LANE, _PARTS, _KEYS = 5, 6, 7, 8  # purposes of hashed words, part of their key; ingest/shuffle/order.py has the others

_KEYED = range(2, 6)
"""Rounds in which a lane adds its key."""

_CHUNK = 15_000
"""Ids computed at once. Their arrays stay in the processor's cache, and below the 128 KiB that malloc maps anew each time."""

_BUCKETS = 8
"""Least number of buckets per part in the table that finds a row's part; each bucket is 8 bytes."""

_MANY = 1 << 16
"""The table of more parts is out of the processor's caches in any case: it is kept small, with a bucket or two a part."""

_MOST_ENDS_INSIDE = 4
"""If a bucket holds the ends of more parts, a binary search is as fast."""


def lanes_of(rank: int, world_size: int, lanes: int) -> tuple[int, int]:
    """Return the range of the lanes that a worker reads from; more workers than lanes share them.

    If there are more workers, and the lanes do not divide the batch, a worker's slice may reach into a lane beside its range,
    whose shards are fetched when they are read, not ahead.
    """
    end = (rank + 1) * lanes
    return rank * lanes // world_size, end // world_size if world_size <= lanes else -(-end // world_size)


class PartOf:
    """Finds the part (a shard, a block) of a row: a table has the part of each bucket's first row, and ends inside are counted.

    Takes 1.5 ns a row, where a binary search takes 9 (8 parts) to 40 (512 parts).

    Args:
        ends: rows up to the end of each part, ascending.
    """

    def __init__(self, ends: Ids) -> None:
        self._ends = ends
        rows, many = int(ends.max(initial=0)), len(ends) > _MANY
        self._shift = max(0, (rows // ((1 if many else _BUCKETS) * max(1, len(ends)))).bit_length() - 1)
        buckets = -(-rows >> self._shift) + 1
        self._table = np.empty(buckets, np.int32 if many else np.int64)
        for begin in range(0, buckets, _MANY):  # in pieces: a million shards are found in the memory that the table takes
            firsts = np.arange(begin, min(begin + _MANY, buckets)) << self._shift
            self._table[begin : begin + _MANY] = ends.searchsorted(firsts, side="right")
        self._ends_inside = int(np.diff(self._table).max(initial=0))

    def __call__(self, ids: Ids) -> Ids:
        """Return the part of each row: int64, shape (n,) to (n,)."""
        if self._ends_inside > _MOST_ENDS_INSIDE:
            return self._ends.searchsorted(ids, side="right")
        parts: Ids = self._table.take(ids >> self._shift).astype(np.int64, copy=False)
        for _ in range(self._ends_inside):
            parts += ids >= self._ends.take(parts)
        return parts


class LaneRows:
    """The rows of every epoch, dealt to lanes.

    Args:
        shards: rows of each shard, in row order.
        lanes: at most as many as rows.
        seed: of the order.
        window_rows: about the rows of the windows of all lanes together; 0 shuffles each lane as a whole.
        run_rows: rows of the runs that a window is made of; 0 takes whole shards.
        stored: deal the shards, and read each lane, as stored.
        streamed: the shards are units of a stream, each prepared once: one that is cut between two lanes comes first in both,
            or last in both, and windows are at most `window_rows`, or a unit in each lane.
    """

    def __init__(
        self,
        shards: ArrayLike,
        lanes: int,
        seed: int,
        window_rows: int = 0,
        run_rows: int = 0,
        *,
        stored: bool = False,
        streamed: bool = False,
    ) -> None:
        sizes = np.asarray(shards, np.int64)
        self.rows, self.lanes, self._seed, self._stored = int(sizes.sum()), lanes, seed, stored
        self._streamed = streamed
        deal = np.arange(len(sizes)) if stored else Permutation(len(sizes), hash_words(seed, _DEAL))(np.arange(len(sizes)))
        ends = np.cumsum(sizes[deal])
        begins = ends - sizes[deal]
        self._lane_rows, more = divmod(self.rows, lanes)
        self._sizes = np.full(lanes, self._lane_rows) + (np.arange(lanes) < more)
        self._begins = np.cumsum(self._sizes) - self._sizes
        runs = np.arange(0, self.rows, max(run_rows, -(-self.rows // PARTS_MOST))) if run_rows else np.empty(0, np.int64)
        # Parts of the line that lie in one shard, in one lane and in one run.
        self._part_begins = np.unique(np.concatenate([begins, self._begins, runs]))
        shard = np.searchsorted(ends, self._part_begins, side="right").astype(np.int32)
        self._row_0 = ((np.cumsum(sizes) - sizes)[deal] - begins)[shard]
        self._row_0 += self._part_begins
        self._shard = deal.astype(np.int32)[shard]
        self.windows, self._mean_part_rows = 1, run_rows or self.rows / len(sizes)
        if window_rows:
            least = 1 if run_rows else self._mean_part_rows
            windows = self._lane_rows / max(least, window_rows / lanes)
            self.windows = max(1, math.ceil(windows) if streamed else int(windows))
        self._parts = functools.lru_cache(maxsize=1)(self._parts_of)
        self._network = functools.lru_cache(maxsize=4)(self._network_of)

    def ids_at(self, epoch: int, positions: Ids) -> Ids:
        """Return row ids at ascending `positions` of an epoch: int64, shape (n,) to (n,)."""
        out = np.empty(len(positions), np.int64)
        part_of, shift = self._parts(epoch if self.windows > 1 else 0)
        begin = 0
        if self._stored:
            np.floor_divide(positions, self.lanes, out=out)
            begin = len(out)
        while begin < len(positions):
            window = self._window_at(int(positions[begin]) // self.lanes)
            first, end = self._window_begin(window), self._window_begin(window + 1)
            stop = int(positions.searchsorted(end * self.lanes)) if window < self.windows - 1 else len(positions)
            self._network(epoch, window).numbers(positions[begin:stop], first, out[begin:stop])
            if first:
                out[begin:stop] += first
            begin = stop
        for begin in range(0, len(out), _CHUNK):
            line = out[begin : begin + _CHUNK]
            line += self._begins.take(_lane_of(positions[begin : begin + _CHUNK], self.lanes))
            line += shift.take(part_of(line))
        return out

    def shards_of(self, low: int, high: int) -> Ids:
        """Return the shards with rows of lanes [low, high), in the order of the line: int64 [shards]."""
        ends = (self._begins + self._sizes)[high - 1] if high > low else 0
        parts = (self._part_begins >= self._begins[min(low, self.lanes - 1)]) & (self._part_begins < ends)
        shards, first = np.unique(self._shard[parts], return_index=True)
        return shards[np.argsort(first)]

    def part_uses(self, epoch: int) -> tuple[Ids, Ids, Ids]:
        """Return each part's shard, its lane, and the position where the window ends that has its last row: int64 [parts]."""
        lengths = np.diff(self._part_begins, append=self.rows)
        order = np.argsort(self._part_words(epoch), kind="stable") if self.windows > 1 else np.arange(len(lengths))
        ends = np.cumsum(lengths[order])
        lane = np.searchsorted(self._begins, ends) - 1
        window_ends = np.arange(1, self.windows + 1) * self._lane_rows // self.windows
        window_ends[-1] = self._sizes.max()
        offsets = window_ends[np.searchsorted(window_ends, ends - self._begins[lane])]
        return self._shard[order].astype(np.int64), lane, np.minimum(offsets * self.lanes, self.rows)

    def window_at(self, position: int) -> int:
        """Return the number of the window that a position lies in."""
        return self._window_at(position // self.lanes)

    @property
    def window_rows(self) -> int:
        """Rows of the windows of all lanes together."""
        return -(-self.rows // self.windows)

    @property
    def parts_at_once(self) -> int:
        """About the runs or shards of one lane that a window begins, holds and ends in, if they are of like size."""
        return round(self.window_rows / self.lanes / self._mean_part_rows) + 1

    def _window_begin(self, window: int) -> int:
        return window * self._lane_rows // self.windows

    def _window_at(self, offset: int) -> int:
        window = min(offset * self.windows // self._lane_rows, self.windows - 1)
        while window + 1 < self.windows and self._window_begin(window + 1) <= offset:
            window += 1
        return window

    def _parts_of(self, epoch: int) -> tuple[PartOf, Ids]:
        """Order each lane's parts for an epoch. Returns also the difference of a row's id and its place in that order."""
        lengths = np.diff(self._part_begins, append=self.rows)
        if self.windows == 1:
            return PartOf(self._part_begins + lengths), self._row_0 - self._part_begins
        order = np.argsort(self._part_words(epoch), kind="stable")
        lengths = lengths[order]
        ends = np.cumsum(lengths)
        lengths -= ends
        lengths += self._row_0[order]
        return PartOf(ends), lengths

    def _part_words(self, epoch: int) -> NDArray[np.uint64]:
        """Return what each lane's parts are sorted by: the lane, and 48 hashed bits. In place: there may be two million."""
        words = np.arange(1, len(self._part_begins) + 1, dtype=np.uint64)
        words *= np.uint64(GOLDEN)
        words += np.uint64(self._word(epoch, _PARTS))
        words = mix_words(words) >> np.uint64(16)
        lane = np.searchsorted(self._begins, self._part_begins, side="right")
        if self._streamed:
            begun = np.flatnonzero(np.diff(self._shard) == 0)  # its end lies in the next lane
            words[begun] = words[begun + 1] = np.where(lane[begun] % 2, 0, (1 << 48) - 1)
        words |= lane.astype(np.uint64) << np.uint64(48)
        return words

    def _network_of(self, epoch: int, window: int) -> _Network:
        last = window == self.windows - 1
        rows = self._window_begin(window + 1) - self._window_begin(window)
        sizes = rows + (self._sizes - self._lane_rows if last else np.zeros(self.lanes, np.int64))
        return _Network(sizes, self._word(epoch, _LANE, window))

    def _word(self, *words: int) -> int:
        return hash_words(self._seed, *words)


def _lane_of(positions: Ids, lanes: int) -> Ids:
    return positions & (lanes - 1) if lanes & (lanes - 1) == 0 else positions % lanes


class _Network:
    """A permutation for each lane, with common tables and own keys.

    Args:
        sizes: numbers of each lane; they differ by at most one.
        key: 64-bit integer.
    """

    def __init__(self, sizes: Ids, key: int) -> None:
        self._sizes, most = sizes, int(sizes.max())
        self._least = int(sizes.min())
        self._stored: Ids | None = None
        if most <= SMALL:
            counters = np.arange(1, len(sizes) * most + 1, dtype=np.uint64).reshape(len(sizes), most)
            hashed = mix_words(counters * np.uint64(GOLDEN) + np.uint64(hash_words(key)))
            hashed[np.arange(most) >= sizes[:, None]] = np.iinfo(np.uint64).max  # to the end
            self._stored, self._most = np.argsort(hashed, axis=1, kind="stable").reshape(-1), most
            return
        left = math.isqrt(most - 1) + 1
        right = -(-most // left)
        self._left, self._right = np.uint32(left), np.uint32(right)
        self._kind = np.uint32 if left * right < 1 << 32 else np.int64  # the narrow one is faster
        self._row = self._kind(right)
        halves = [(right, left), (left, right)]
        self._tables, self._keys = [], []
        for number in range(ROUNDS):
            found = table(hash_words(key, number), *halves[number % 2])
            keys = table(hash_words(key, number, _KEYS), len(sizes), halves[number % 2][0]) if number in _KEYED else None
            # Twice, so that the sum of a half and a key need not be reduced.
            self._tables.append(np.concatenate([found, found]) if keys is not None else found)
            self._keys.append(keys)

    def numbers(self, positions: Ids, first: int, out: Ids) -> None:
        """Write to `out` each position's number in its lane; its window begins at offset `first`: int64, (n,) to (n,)."""
        for begin in range(0, len(out), _CHUNK):
            self._find(positions[begin : begin + _CHUNK], first, out[begin : begin + _CHUNK])
        if self._stored is not None:
            return
        outside = np.flatnonzero(out >= self._least)
        while len(outside):
            lanes = positions[outside] % len(self._sizes)
            still = out[outside] >= self._sizes[lanes]
            outside, lanes = outside[still], lanes[still]
            again = out[outside]
            self._forward(again, lanes, again)
            out[outside] = again

    def _find(self, positions: Ids, first: int, out: Ids) -> None:
        lanes = _lane_of(positions, len(self._sizes))
        offsets = positions // len(self._sizes)
        offsets -= first
        if self._stored is not None:
            self._stored.take(lanes * self._most + offsets, out=out, mode="clip")
        else:
            self._forward(offsets, lanes, out)

    def _forward(self, values: Ids, lanes: Ids, out: Ids) -> None:
        values = values.astype(self._kind, copy=False)
        halves = values // self._row
        right = (values - halves * self._row).astype(np.uint32, copy=False)
        left = halves.astype(np.uint32, copy=False)
        spare: Half = np.empty_like(left)
        for number, (found, keys) in enumerate(zip(self._tables, self._keys, strict=True)):
            changed, looked_up, below = (left, right, self._left) if number % 2 == 0 else (right, left, self._right)
            if keys is not None:
                looked_up = looked_up + keys.take(lanes)
            changed += found.take(looked_up)
            # Modulo: below the size, the unsigned difference wraps to a huge one.
            np.minimum(changed, np.subtract(changed, below, out=spare), out=changed)
        whole: NDArray[Any] = left.astype(self._kind, copy=False)
        whole *= self._row
        whole += right
        out[:] = whole
