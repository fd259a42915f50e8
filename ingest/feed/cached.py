"""How does a training worker read a cached dataset? It computes the ids of its share of each batch and gathers them ahead.

The global batch at position p of an epoch holds the rows `order.ids(epoch, p, p + batch_rows)`; a sample, a mixture and steps
by length put other rows there. With lanes a worker opens only the shards of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.digest import digest_of
from penstock.errors import DataError
from penstock.ingest.feed.batch import Batch, FeedShare, ShareArguments, own_positions
from penstock.ingest.feed.cursor import Feed
from penstock.ingest.feed.gather import RowGather
from penstock.ingest.feed.lists import cut_lists
from penstock.ingest.feed.mapped_shards import ShardPlaces, shard_rows
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.schema import SPLITS, ColumnInfo, FeedSchema, Split
from penstock.ingest.shuffle.length_pools import Pools, find_column
from penstock.ingest.shuffle.order import Order
from penstock.ingest.shuffle.sampling import check_column, make_draws, mixed_draws
from penstock.ingest.spec import LengthSpec
from penstock.storage import Storage

__all__ = ["CachedFeed", "batches_at_once", "gathered", "make_pools", "open_cached_feed", "select_columns", "shards_in"]

GROUP_BYTES = 4 << 20
"""About the size of a group. Passing an item between threads costs more than gathering a small batch, and a group should still
be in the processor's cache when it is used."""

IDS_AT_ONCE = 1 << 15
"""About the number of ids computed in one call."""

MAX_GROUP_BATCHES = 128
"""Of small rows: more would leave the processor's cache."""

IdsAt = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]
"""(epoch, ascending positions) -> row ids."""


class CachedFeed(Feed):
    """Reads rows by their ids from mapped shards or blocks in memory. Runs in a training worker.

    An epoch can be read again, also from another position and at the same time.
    """

    only_copies = True

    def __init__(
        self,
        schema: FeedSchema,
        split: Split,
        content: str,
        rows: RowGather,
        order: Order,
        part: FeedShare,
        *,
        is_pending: bool = False,
    ) -> None:
        if order.rows != rows.num_rows:
            raise ValueError(f"the order is for {order.rows} rows, the {split} split has {rows.num_rows}")
        part = part._replace(lanes=order.lanes)
        super().__init__(schema, split, content, order, part)
        self._rows, self._is_pending = rows, is_pending
        self._ids_at = order.ids_at
        if order.sample is not None:
            check_column(order.sample, schema.columns)
            self._ids_at = make_draws(order.sample, order.seed, rows.column(order.sample.column)).ids_at
        elif order.mixture is not None:
            self._ids_at = mixed_draws(order.mixture, order.seed).ids_at
        if part.last != "keep" and order.by_length is not None:
            raise ValueError(f"last={part.last!r} cannot be used with steps by length")
        if self.num_rows > order.epoch_rows:
            self._ids_at = partial(_filled_ids, self._ids_at, order.epoch_rows, order.lanes)
        self._unpooled_ids_at = self._ids_at
        self._pools: Pools | None = None
        if order.by_length is not None:
            self._pools = make_pools(order.by_length, order.seed, rows, self.num_rows, part.batch_rows, self._ids_at)
            self._ids_at = self._pools.ids_at

    def __iter__(self) -> NoReturn:
        raise TypeError("a feed has no single epoch: use `for batch in feed.batches(epoch)`, or iterate over FeedDataset(feed)")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a feed holds open files and threads and cannot be pickled: call open_feed in the process that reads it"
        )

    def deliver_to(self, device: torch.device | str) -> None:
        """Put every batch read from now on on `device`; for a GPU, gather rows into pinned memory."""
        super().deliver_to(device)
        self._rows.pin_memory(torch.device(device).type == "cuda")

    def _groups(self, epoch: int, start: int) -> Generator[list[Batch]]:
        # A batch must not wait for the rows of the next ones while these are prepared.
        at_once = 1 if self._is_pending and epoch == 0 else batches_at_once(self.part, self._rows.row_bytes)
        announced = start if self._rows.ahead_rows else self.num_rows
        for planned in self._cuts(epoch, start, at_once):
            own = own_positions(self.part, planned)
            for first in range(0, len(planned), at_once):
                cuts = planned[first : first + at_once]
                while announced < min(cuts[-1][1] + self._rows.ahead_rows, self.num_rows):
                    upto = min(announced + self._rows.ahead_rows, self.num_rows)
                    # Not the ids of steps by length: computing those opens shards to read the lengths.
                    ahead_ids = self._unpooled_ids_at(epoch, self._own_positions(announced, upto))
                    self._rows.will_need(ahead_ids, reset=announced == start)
                    announced = upto
                if first == 0:
                    ids = self._ids_at(epoch, np.concatenate(own))
                group = gathered(self._rows, cuts, own[first : first + at_once], ids)
                ids = ids[sum(batch.rows for batch in group) :]
                yield group

    def _own_positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the positions of [start, stop) that this rank reads; all positions for steps by length."""
        positions, batch_rows = np.arange(start, stop), self.part.batch_rows
        if self._pools is not None or self.part.world_size == 1:
            return positions
        if self.part.lanes > 1:
            return self.part.lane_positions(start, stop)
        first = positions - positions % batch_rows
        rows = np.minimum(batch_rows, self.num_rows - first)
        low, high = (rows * rank // self.part.world_size for rank in (self.part.rank, self.part.rank + 1))
        return positions[(positions - first >= low) & (positions - first < high)]

    def _cuts(self, epoch: int, start: int, at_once: int) -> Iterator[list[tuple[int, int]]]:
        """Yield (first, end) positions of global batches: one list for each call that computes ids."""
        batch_rows = self.part.batch_rows
        # Only a plain global order and lanes compute just the requested ids; others may compute those of other ranks, too.
        own_only = self.order.mode == "global" or self.order.lanes > 1
        found_rows = batch_rows // self.part.world_size if own_only else batch_rows
        count = at_once * max(1, min(MAX_GROUP_BATCHES, IDS_AT_ONCE // max(1, found_rows)) // at_once)
        if self._pools is not None:
            steps = self._pools.steps(epoch, start)
            while some := list(itertools.islice(steps, at_once)):
                yield some
            return
        for first in range(start, self.num_rows, batch_rows * count):
            stop = min(first + batch_rows * count, self.num_rows)
            yield [(begin, min(begin + batch_rows, stop)) for begin in range(first, stop, batch_rows)]


def batches_at_once(part: FeedShare, row_bytes: int) -> int:
    """Return the number of batches that are gathered in one call."""
    local_bytes = max(1, part.batch_rows * row_bytes // part.world_size)
    return min(MAX_GROUP_BATCHES, max(1, GROUP_BYTES // local_bytes))


def make_pools(spec: LengthSpec, seed: int, rows: RowGather, epoch_rows: int, batch_rows: int, ids_at: IdsAt) -> Pools:
    """Make the steps by length over `rows`. Raises SpecError if the column of lists does not exist."""
    column = find_column(spec, rows.columns)
    return Pools(spec, column, seed, epoch_rows, batch_rows, ids_at, partial(rows.lengths, column.name))


def gathered(
    rows: RowGather, cuts: Sequence[tuple[int, int]], own: Sequence[NDArray[np.int64]], ids: NDArray[np.int64]
) -> list[Batch]:
    """Gather one rank's share of some global batches in one call and cut them apart: they share one allocation.

    `unsafe_split` gives each batch's tensors their own version counter: otherwise autograd would take a change of one batch, by
    the caller or by an augmentation ahead, for a change of the others.

    Args:
        cuts: (first, end) positions of each global batch.
        own: this rank's positions in each.
        ids: of the rows at these positions, int64 [n]; further ids are ignored.
    """
    sizes = list(map(len, own))
    ids = ids[: sum(sizes)]
    with torch.inference_mode(False):  # the caller may train on the tensors later
        columns = {name: torch.unsafe_split_with_sizes(tensor, sizes) for name, tensor in rows.take(ids).items()}
        lists = [cut_lists(info, packed, sizes) for info, packed in rows.take_lists(ids)]
        arrow = rows.take_arrow(ids)
    group, taken = [], 0
    for index, ((begin, stop), size) in enumerate(zip(cuts, sizes, strict=True)):
        tensors = {name: parts[index] for name, parts in columns.items()}
        for cut in lists:
            tensors.update(cut[index])
        first = int(own[index][0]) if size else begin
        values = {name: column.slice(taken, size) for name, column in arrow.items()}
        group.append(Batch(tensors, ids[taken : taken + size], size, stop - begin, first, stop, values))
        taken += size
    return group


def _filled_ids(ids_at: IdsAt, epoch_rows: int, lanes: int, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ids at positions; those from `epoch_rows` on repeat the first rows of their lane, so that no rank reads others."""
    inside = positions < epoch_rows
    beyond, lane = positions[~inside], positions[~inside] % lanes
    lane_rows = -(-(epoch_rows - lane) // lanes)
    again = (beyond // lanes - lane_rows) % lane_rows * lanes + lane
    ids = ids_at(epoch, positions[inside])
    return np.concatenate([ids, ids_at(epoch, np.arange(again.max() + 1))[again]]) if len(again) else ids


def open_cached_feed(
    parts: Sequence[tuple[Storage, DatasetManifest]],
    split: Split,
    *,
    order: Order,
    columns: Sequence[str] | None = None,
    **share: Unpack[ShareArguments],
) -> CachedFeed:
    """Open one split of one or several cached datasets for one rank; rows of several are numbered through.

    Shards of a remote storage are fetched into the node's cache.

    Args:
        columns: only these; None reads all. Provenance columns are never gathered.
        share: fields of `FeedShare`.

    Raises:
        DataError: the split does not exist, a local shard is missing or has another size than in the manifest, or the datasets'
            columns or classes differ.
        PreflightError: a global order needs more bytes than the node's cache may hold.
        ValueError: the order is for another number of rows, or the rank is outside the world.
    """
    places, part = shards_in(parts, split), FeedShare(**share)
    schema = _common_schema([select_columns(manifest.feed_schema, columns) for _, manifest in parts])
    order = order.of_shards(places.rows)
    rows = shard_rows(places, schema.columns, order, part.rank, part.world_size)
    content, is_pending = digest_of([shards.content for _, shards in places.parts]), places[0][1].is_pending
    return CachedFeed(schema, split, content, rows, order, part, is_pending=is_pending)


def shards_in(parts: Sequence[tuple[Storage, DatasetManifest]], split: Split) -> ShardPlaces:
    """List the shards of a split, dataset by dataset, each with its storage.

    Raises:
        DataError: a dataset has none, or its table of shards is missing or damaged.
    """
    for _, manifest in parts:
        if not manifest.table.counts.get(split):
            filled = [name for name in SPLITS if manifest.rows.get(name)]
            raise DataError(f"dataset {manifest.key} has no rows in split {split!r}; splits with rows: {', '.join(filled)}")
    return ShardPlaces([(storage, manifest.opened(storage).shards_of(split)) for storage, manifest in parts])


def _common_schema(schemas: Sequence[FeedSchema]) -> FeedSchema:
    """Return the schema that all have, with the largest number of classes."""
    first = schemas[0]
    for other in schemas[1:]:
        for name in ("columns", "label", "classes"):
            here, there = getattr(first, name), getattr(other, name)
            if here != there:
                raise DataError(
                    f"the datasets differ in their {name}: {_format(here)} and {_format(there)}",
                    next_step="prepare them with the same transforms, or read only `columns` that they have in common",
                )
    counts = [schema.num_classes for schema in schemas if schema.num_classes is not None]
    return first.model_copy(update={"num_classes": max(counts)}) if counts else first


def _format(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], ColumnInfo):
        return ", ".join(f"{column} {column.ragged}" if column.ragged else str(column) for column in value)
    return repr(value)


def select_columns(schema: FeedSchema, columns: Sequence[str] | None) -> FeedSchema:
    """Reduce the schema to `columns`, in that order. Raises KeyError for an unknown column."""
    return schema if columns is None else schema.model_copy(update={"columns": tuple(schema[name] for name in columns)})
