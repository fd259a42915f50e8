"""In which order does training see the rows? In an order computed from (seed, epoch, number of rows).

Windows also depend on their size, samples and mixtures (ingest/shuffle/sampling.py) on their values, steps by length on the
lengths and the batch size, lanes (ingest/shuffle/lanes.py) on the shards; none depends on the number of ranks. Each rank takes
its share of a global batch, so that any world size sees the same rows in each step, and the position is the only state.
Checkpoints keep a fingerprint of the parameters and of some generated ids, so that a changed generator is found before it
repeats or skips rows. Source: google/grain, where the sample order is a function of the index (own code).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import NonNegativeInt, PositiveInt, PrivateAttr, model_validator

from penstock.config import Section
from penstock.digest import bytes_digest, digest_of
from penstock.errors import SpecError
from penstock.ingest.schema import ColumnInfo
from penstock.ingest.shuffle.lanes import LaneRows
from penstock.ingest.shuffle.length_pools import Pools
from penstock.ingest.shuffle.permutation import Permutation
from penstock.ingest.shuffle.sampling import Mixture, make_draws, mixed_draws
from penstock.ingest.spec import LengthSpec, SampleSpec, ShuffleSpec
from penstock.ingest.splitmix import hash_words
from penstock.messages import counted

__all__ = ["GROUPS_PER_WINDOW", "Order", "ShardRows", "make_order"]

Ids = NDArray[np.int64]

GROUPS_PER_WINDOW = 32
"""Groups of consecutive rows, from all over the split, in one window: enough to mix well, few enough to read each in one go."""

UNITS_BYTES = 1 << 30
"""Most bytes that the units of a stream in use, one for each lane of `lanes: auto`, take on all workers beyond a window."""

_GLOBAL, _GROUPS, _WINDOW = 1, 2, 3  # purpose of a permutation, part of its key

_CALL_ROWS = 8192
"""Ids that take as long to compute as the fixed cost of a call, 0.08 ms."""

_PROBE_EPOCHS = (0, 1, 1000)

_PROBE_ROWS = 64


class ShardRows(Section):
    """Rows of each shard of a split, in row order. Saved, sent and compared as their digest, in 16 bytes for any number."""

    digest: str = ""
    count: NonNegativeInt = 0
    _rows: Ids | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, rows: ArrayLike) -> ShardRows:
        """Describe the rows of some shards, and hold them."""
        held = np.asarray(rows, np.int64)
        content = held.astype("<i8", order="C", copy=False).view(np.uint8)
        made = cls(digest=bytes_digest(content.data) if len(held) else "", count=len(held))
        made._rows = held
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardRows) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def rows(self) -> Ids:
        """Rows of each shard: int64 [count]. Raises ValueError if only the digest is known."""
        if self._rows is None:
            raise ValueError(f"the rows of {self.count:,} shards are not known: use Order.of_shards")
        return self._rows

    @property
    def is_held(self) -> bool:
        """Whether the rows are known, not only their digest."""
        return self._rows is not None or not self.count


class Order(Section):
    """The order of one split's rows in every epoch. Plain data; the same in every process."""

    version: Literal[1, 2, 3] = 1
    """2: rows are dealt to lanes (ingest/shuffle/lanes.py); 3: those of a stream, whose units are the shards."""
    mode: Literal["none", "windowed", "global"]
    seed: int = 0
    """Taken modulo 2**64."""
    rows: NonNegativeInt
    window_rows: NonNegativeInt = 0
    """About the rows of one window of `windowed`: rounded down to whole groups, or up to whole shards."""
    shards: ShardRows = ShardRows()
    """Rows of each shard, in row order, for lanes and for windows of whole shards; an order that was saved or sent has them
    from `of_shards`."""
    lanes: PositiveInt = 1
    """Parts that the rows are dealt to; each worker serves some of them in every batch."""
    run_rows: NonNegativeInt = 0
    """With lanes: rows of the runs that a window is made of; 0 for whole shards."""
    sample: SampleSpec | None = None
    """Draw rows by a column; ids then also depend on its values (`sampling.make_draws`)."""
    mixture: Mixture | None = None
    """Draw rows from several datasets (`sampling.mixed_draws`)."""
    by_length: LengthSpec | None = None
    """Put rows into steps by length; their order then also depends on the lengths (`length_pools.Pools`)."""

    @model_validator(mode="after")
    def _shards_hold_the_rows(self) -> Order:
        count = self.shards.count
        if count and self.shards.is_held and (found := int(self.shards.rows.sum())) != self.rows:
            raise ValueError(f"the shards have {found} rows, the split {self.rows}")
        if (self.version == 1) != (self.lanes == 1) or (self.lanes > 1 and (not count or self.lanes > self.rows)):
            raise ValueError(f"version {self.version} has no {self.lanes} lanes of {count} shards, {self.rows} rows")
        return self

    def of_shards(self, rows: ArrayLike) -> Order:
        """Return the order with the rows of the shards that it was made for. Raises ValueError for those of others."""
        if self.shards.is_held:
            return self
        held = ShardRows.of(rows)
        if held != self.shards:
            raise ValueError(f"the order is of {self.shards.count:,} other shards than these {held.count:,}")
        return self.model_copy(update={"shards": held})

    @property
    def is_drawn(self) -> bool:
        """Whether an epoch may hold a row more than once, or not at all."""
        return self.sample is not None or self.mixture is not None

    @property
    def epoch_rows(self) -> int:
        """Positions of an epoch: the rows of the split, unless a sample or a mixture sets another number."""
        drawn = self.sample or self.mixture
        return (drawn.rows if drawn is not None else None) or self.rows

    @property
    def fingerprint(self) -> str:
        """Digest of the parameters and of generated ids at the start, middle and end of three epochs."""
        return _fingerprint(self)

    @property
    def lane_rows(self) -> LaneRows:
        """The rows of `lanes`, if there are several."""
        stored, streamed = self.mode == "none", self.version == 3
        return _lane_rows(self.shards, self.lanes, self.seed, self.window_rows, self.run_rows, stored, streamed)

    @property
    def group_rows(self) -> int:
        """Rows of one group of `windowed`: consecutive in the split, and read together."""
        return max(1, self.window_rows // GROUPS_PER_WINDOW)

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Return row ids at positions [start, stop) of an epoch: int64, shape (stop - start,), each in [0, rows).

        Takes about 10 ns per id in ranges of some thousand.

        Raises:
            ValueError: a negative epoch, positions outside [0, rows], or a sample or mixture (use `Draws`).
        """
        if self.is_drawn:
            raise ValueError("rows are drawn: use penstock.ingest.shuffle.sampling to compute ids")
        if epoch < 0 or not 0 <= start <= stop <= self.rows:
            raise ValueError(f"positions [{start}, {stop}) of epoch {epoch} are not within the order's {self.rows} rows")
        if start == stop or (self.mode == "none" and self.lanes == 1):
            return np.arange(start, stop, dtype=np.int64)
        if self.lanes > 1:
            return self.lane_rows.ids_at(epoch, np.arange(start, stop, dtype=np.int64))
        if self.mode == "global":
            return _permutation(self.rows, self.seed, epoch, _GLOBAL, 0)(np.arange(start, stop, dtype=np.int64))
        return self._shard_ids(epoch, start, stop) if self.shards.count else self._windowed_ids(epoch, start, stop)

    def ids_at(self, epoch: int, positions: Ids) -> Ids:
        """Return row ids at ascending `positions` of an epoch: int64, shape (n,) to (n,).

        `global` and lanes compute no others; other modes compute those of gaps that are shorter than another call would take.

        Raises:
            ValueError: a negative epoch, or positions outside [0, rows).
        """
        if not len(positions):
            return np.empty(0, np.int64)
        start, stop = int(positions[0]), int(positions[-1]) + 1
        if not self.is_drawn and epoch >= 0 and 0 <= start < stop <= self.rows:
            if self.lanes > 1:
                return self.lane_rows.ids_at(epoch, positions)
            if self.mode == "global":
                return _permutation(self.rows, self.seed, epoch, _GLOBAL, 0)(positions)
        ends = np.flatnonzero(np.diff(positions) > 1) + 1
        if stop - start > (len(ends) + 1) * _CALL_ROWS:  # one rank of many: its part of each batch alone
            return np.concatenate([self.ids(epoch, int(run[0]), int(run[-1]) + 1) for run in np.split(positions, ends)])
        return self.ids(epoch, start, stop)[positions - start]

    def _shard_ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Shuffle the shards each epoch, cut them into windows, and permute the rows inside each window."""
        dealt = _dealt_shards(self.shards, self.window_rows, self.seed, epoch)
        parts = []
        first_window, last_window = np.searchsorted(dealt.window_ends, [start, stop - 1], side="right").tolist()
        for window in range(first_window, last_window + 1):
            begin, end = dealt.shards_in(window)
            ends = dealt.ends[begin:end]
            first = int(dealt.ends[begin - 1]) if begin else 0
            size = int(ends[-1]) - first
            positions = np.arange(max(start, first) - first, min(stop, first + size) - first, dtype=np.int64)
            inside = _permutation(size, self.seed, epoch, _WINDOW, window)(positions) + first
            shard = begin + np.searchsorted(ends, inside, side="right")
            parts.append(inside + dealt.shift[shard])
        return np.concatenate(parts)

    def _windowed_ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Shuffle the groups into windows each epoch, and permute the rows inside each window."""
        num_groups = -(-self.rows // self.group_rows)
        deal = _permutation(num_groups, self.seed, epoch, _GROUPS, 0)
        missing = num_groups * self.group_rows - self.rows  # rows that the split's last group is shorter by
        short_at = int(deal.inverse(np.array([num_groups - 1], np.int64))[0])
        per_window = max(1, self.window_rows // self.group_rows)
        full_window = per_window * self.group_rows

        def first_row_of(window: int) -> int:
            dealt = min(window * per_window, num_groups)
            return dealt * self.group_rows - (missing if dealt > short_at else 0)

        parts = []
        window = start // full_window  # the short group moves a boundary by less than a group, so this or the next one
        while first_row_of(window) < stop:
            first, end = first_row_of(window), first_row_of(window + 1)
            if end > start:
                positions = np.arange(max(start, first) - first, min(stop, end) - first, dtype=np.int64)
                inside = _permutation(end - first, self.seed, epoch, _WINDOW, window)(positions)
                begin = window * per_window
                groups = deal(np.arange(begin, min(begin + per_window, num_groups), dtype=np.int64))
                if begin <= short_at < begin + per_window:
                    inside[inside >= (short_at - begin + 1) * self.group_rows - missing] += missing
                shift = (groups - np.arange(len(groups))) * self.group_rows
                parts.append(inside + shift.take(inside // self.group_rows))
            window += 1
        return np.concatenate(parts)


class _Dealt(NamedTuple):
    """The shards of a split in the order of one epoch."""

    ends: Ids
    """Position in the epoch at which each shard ends."""
    shift: Ids
    """Difference of a row's id and its position before the window is shuffled, by shard."""
    window_ends: Ids
    """Position at which each window ends."""

    def shards_in(self, window: int) -> tuple[int, int]:
        """Return the range of the shards of a window."""
        first = int(np.searchsorted(self.ends, self.window_ends[window - 1])) + 1 if window else 0
        return first, int(np.searchsorted(self.ends, self.window_ends[window])) + 1


@functools.lru_cache(maxsize=4)
def _dealt_shards(shards: ShardRows, window_rows: int, seed: int, epoch: int) -> _Dealt:
    sizes = shards.rows
    deal = _permutation(len(sizes), seed, epoch, _GROUPS, 0)(np.arange(len(sizes), dtype=np.int64))
    ends = np.cumsum(sizes[deal])
    starts_of_ids = np.cumsum(sizes) - sizes
    shift = starts_of_ids[deal] - (ends - sizes[deal])
    # A window ends with the shard that fills `window_rows`; the rest at the end is a window, too.
    window_ends, taken = [], 0
    for end in ends.tolist():
        if end - taken >= window_rows or end == ends[-1]:
            window_ends.append(end)
            taken = end
    return _Dealt(ends, shift, np.array(window_ends, np.int64))


def make_order(
    shuffle: ShuffleSpec, rows: int, shards: ArrayLike = (), batch_rows: int = 1, unit_bytes: ArrayLike | None = None
) -> Order:
    """Make the order of a `shuffle` section over a split of `rows` rows. Fields without effect stay 0.

    Args:
        shards: rows of each shard of the split, in row order; needed for lanes and windows of whole shards.
        batch_rows: of a step over all workers, which `lanes: auto` divides.
        unit_bytes: of a stream, whose units are the shards: bytes of each.

    Raises:
        SpecError: there are fewer rows than `shuffle.lanes`, or lanes would be smaller than a unit of a stream.
    """
    seed = 0 if shuffle.mode == "none" else shuffle.seed
    window = shuffle.window_rows if shuffle.mode == "windowed" else 0
    by_shards = shuffle.mode == "windowed" and shuffle.window_of == "shards"
    lanes, found = shuffle.most_lanes(batch_rows), ShardRows.of(shards)
    streamed, most_rows = unit_bytes is not None, int(found.rows.max(initial=1))
    if shuffle.lanes == "auto":
        at_most = found.count
        if unit_bytes is not None:
            most_bytes = int(np.max(unit_bytes, initial=1))
            at_most = min(rows // most_rows, max(window // most_rows, UNITS_BYTES // most_bytes))
        lanes = min(lanes, 1 << at_most.bit_length() >> 1) or 1
    elif lanes > rows:
        raise SpecError(f"shuffle.lanes: {lanes} lanes for {counted(rows, 'row')}", next_step="use fewer, or lanes: auto")
    elif streamed and lanes > 1 and rows // lanes < most_rows:
        raise SpecError(
            f"shuffle.lanes: {lanes} lanes of {rows // lanes:,} rows are smaller than the stream's largest unit (a file, or a "
            f"piece of a large one), which has {most_rows:,}",
            next_step="use fewer, or lanes: auto, smaller files, or materialize.cache: disk",
        )
    return Order(
        version=1 if lanes == 1 else 3 if streamed else 2, mode=shuffle.mode, seed=seed, rows=rows, window_rows=window,
        shards=found if by_shards or lanes > 1 else ShardRows(), lanes=lanes,
        run_rows=max(1, window // GROUPS_PER_WINDOW) if lanes > 1 and window and not by_shards and not streamed else 0,
        sample=shuffle.sample, by_length=shuffle.by_length,
    )  # fmt: skip


@functools.lru_cache(maxsize=4)
def _lane_rows(
    shards: ShardRows, lanes: int, seed: int, window_rows: int, run_rows: int, stored: bool, streamed: bool
) -> LaneRows:
    return LaneRows(shards.rows, lanes, seed, window_rows, run_rows, stored=stored, streamed=streamed)


@functools.lru_cache(maxsize=64)
def _permutation(size: int, seed: int, epoch: int, purpose: int, number: int) -> Permutation:
    return Permutation(size, hash_words(seed, epoch, purpose, number))


@functools.lru_cache(maxsize=64)
def _fingerprint(order: Order) -> str:
    last = max(0, order.rows - _PROBE_ROWS)
    plain = order.model_copy(update={"sample": None, "mixture": None})
    probes = [
        plain.ids(epoch, start, min(order.rows, start + _PROBE_ROWS))
        for epoch in _PROBE_EPOCHS
        for start in (0, last // 2, last)
    ]
    if order.sample is not None:
        draws = make_draws(order.sample.model_copy(update={"rows": None}), order.seed, np.arange(_PROBE_ROWS) ** 2 % 7)
        probes += [draws.ids_at(epoch, np.arange(_PROBE_ROWS)) for epoch in _PROBE_EPOCHS]
    if order.mixture is not None:
        draws = mixed_draws(Mixture(sources=((_PROBE_ROWS, 1.0), (7, 2.0))), order.seed)
        probes += [draws.ids_at(epoch, np.arange(_PROBE_ROWS)) for epoch in _PROBE_EPOCHS]
    if order.by_length is not None:
        probes += [ids for epoch in _PROBE_EPOCHS for ids in _pooled_ids(order.by_length, order.seed, epoch)]
    content = np.concatenate(probes).astype("<i8").tobytes()
    without = {"lanes", "run_rows"} if order.lanes == 1 else set()
    return digest_of({"order": order.model_dump(exclude=without), "probe": bytes_digest(content)})


def _pooled_ids(spec: LengthSpec, seed: int, epoch: int) -> Iterator[Ids]:
    """Generate ids with both kinds of pools for rows with known lengths."""
    small = spec.model_copy(update={"pool_batches": 4, "batch_entries": 20})
    for ragged in ("padded", "packed"):
        column = ColumnInfo(name=spec.column, dtype="int64", ragged=ragged)
        pools = Pools(small, column, seed, _PROBE_ROWS, 8, lambda _, positions: positions, lambda ids: ids**2 % 7)
        yield pools.ids_at(epoch, np.arange(_PROBE_ROWS))
