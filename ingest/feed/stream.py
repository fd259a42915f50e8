"""How does a training worker read rows that no disk caches: from Ray's object store, or prepared again each epoch?

`MemoryFeed` (`cache: memory`) is the cached feed over blocks in the object store. The blocks live as long as the Ray cluster
and the process that put them there. After a restart of the driver they are prepared again, and a state continues if the content
is equal.

`StreamFeed` (`cache: none`) prepares the rows in Ray tasks, once per epoch and rank:
- If preparing is deterministic, every row comes once per epoch over all ranks, in one order for every world size.
- Each rank prepares all rows and keeps its share, so W workers prepare every row W times. No rank waits for another one.
- Shuffling reaches as far as `shuffle.window_rows` rows, which each rank holds in memory; steps by length also hold two pools.
- A resume prepares the epoch's rows from the start and skips the consumed ones.
- Ray tasks need CPUs that training workers do not hold (`streams_cpus`). A task that waits for its reader keeps its CPUs, so a
  stream runs at most `tasks` of them: otherwise the tasks of one rank could hold all CPUs while it waits for another rank.
- Plain tasks, not Ray Data: that begins an epoch two seconds later and cancels tasks at the end, which can abort the reading
  process (Ray 2.60; see `penstock.ingest.ray_tasks`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TypeVar, Unpack

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray

from penstock.errors import DataError, SpecError
from penstock.ingest.columns.arrays import Block, column_view, columns_of, contiguous
from penstock.ingest.feed.batch import Batch, FeedShare, ShareArguments, own_positions
from penstock.ingest.feed.cached import (
    CachedFeed,
    batches_at_once,
    gathered,
    make_pools,
    select_columns,
)
from penstock.ingest.feed.cursor import FeedCursor
from penstock.ingest.feed.gather import RowGather, fixed_bytes
from penstock.ingest.materialize.without_disk import MemoryDataset
from penstock.ingest.phases import phase
from penstock.ingest.prepare import ANYWHERE, PrepareSpec
from penstock.ingest.ray_tasks import raising_the_original, ray_streams
from penstock.ingest.schema import ColumnInfo, FeedSchema, Split
from penstock.ingest.shuffle.length_pools import find_column
from penstock.ingest.shuffle.order import Order
from penstock.ingest.splitmix import hash_words

__all__ = ["STREAMS_PER_RANK", "STREAM_CPUS", "MemoryFeed", "StreamFeed", "stream_tasks", "streamed", "streams_cpus"]


STREAM_CPUS = 0.25
"""CPUs that one preparing task of a stream requests: tasks must fit beside workers that hold whole CPUs."""

STREAMS_PER_RANK = 2
"""A rank reads the validation split while its train stream stays open."""

TABLES_AHEAD = 2
"""Tables that a stream's task makes before it waits for its reader; one takes 16 MB, or more if rows are large."""

UNSHUFFLED_BATCHES = 4
"""Most batches gathered at once from an unshuffled stream: each waits for all of them, and rows may be slow."""

T = TypeVar("T")


class MemoryFeed(CachedFeed):
    """Reads a `MemoryDataset`. Blocks are mapped from the node's object store without a copy."""

    def __init__(
        self,
        dataset: MemoryDataset,
        *,
        order: Order,
        columns: Sequence[str] | None = None,
        **share: Unpack[ShareArguments],
    ) -> None:
        schema = select_columns(dataset.schema, columns)
        list_bytes = dataset.size_bytes // max(1, dataset.num_rows) if any(column.varies for column in schema.columns) else 0

        def block(index: int) -> Block:
            with phase("fetch"):  # from another node if this one does not have it
                found: Block = ray.get(dataset.blocks[index])
                return found

        rows = RowGather(schema.columns, dataset.block_rows, block, list_bytes=list_bytes)
        super().__init__(schema, dataset.split, dataset.content, rows, order, FeedShare(**share))


def streamed(
    items: Sequence[T], tables_of: Callable[[T], Iterator[pa.Table]], tasks: int = 1, where: PrepareSpec = ANYWHERE
) -> Callable[[], Iterator[pa.Table]]:
    """Return a picklable function that starts to prepare the rows of `items` in order, in one Ray task each.

    Args:
        items: source files, or commit units.
        tables_of: returns an item's prepared rows as tables of columns as in a shard, the same rows every time.
        tasks: most tasks at a time; the order of rows does not depend on it.
        where: what a task takes, and on which nodes they run.
    """
    return partial(_prepared, list(items), tables_of, tasks, where)


def _prepared(
    items: Sequence[T], tables_of: Callable[[T], Iterator[pa.Table]], tasks: int, where: PrepareSpec
) -> Generator[pa.Table]:
    for references in ray_streams(tables_of, items, where=where, cpus=STREAM_CPUS, at_once=tasks, ahead=TABLES_AHEAD):
        for reference in references:
            with phase("tasks"), raising_the_original():
                table: pa.Table = ray.get(reference)
            yield table


def streams_cpus(ranks: int, where: PrepareSpec = ANYWHERE) -> float:
    """Return the CPUs that training workers must leave free so that every stream of `ranks` ranks can run one task."""
    return ranks * STREAMS_PER_RANK * (where.cpus or STREAM_CPUS)


def stream_tasks(ranks: int, free_cpus: float) -> int:
    """Return how many tasks each stream of `ranks` ranks may run at a time on `free_cpus`, one CPU's work each; at least 1."""
    return max(1, int(free_cpus / (ranks * STREAMS_PER_RANK)))


class StreamFeed(FeedCursor):
    """Reads rows that are prepared again every epoch. See the module's docstring for its promises and their limits.

    Args:
        open_tables: starts to prepare an epoch (for example `streamed`): the same rows in the same order each time.
        order: mode `none`, or `windowed` over `window_rows` consecutive rows of the stream; `rows` is the split's row count.
        content: digest of everything that the rows depend on, for example the key of the preprocess stage.
        prefetch: groups of batches made ahead in a thread; 0 uses none.

    Raises:
        SpecError: an order of mode `global`.
    """

    def __init__(
        self,
        open_tables: Callable[[], Iterator[pa.Table]],
        schema: FeedSchema,
        split: Split,
        *,
        content: str,
        batch_rows: int,
        order: Order,
        rank: int = 0,
        world_size: int = 1,
        columns: Sequence[str] | None = None,
        prefetch: int = 2,
    ) -> None:
        if order.mode == "global":
            raise SpecError(
                "`shuffle.mode: global` needs cached rows, and `materialize.cache: none` streams them",
                next_step="set `shuffle.mode` to windowed or none, or `materialize.cache` to disk or memory",
            )
        part = FeedShare(batch_rows, rank, world_size, prefetch)
        super().__init__(select_columns(schema, columns), split, content, order, part)
        if order.by_length is not None:
            find_column(order.by_length, self.schema.columns)
        self._open_tables = open_tables
        # The lengths of lists are not known ahead, so batches of lists are gathered one by one.
        lists = any(column.varies for column in self.schema.columns)
        self._group_batches = 1 if lists else batches_at_once(part, fixed_bytes(self.schema.columns))
        if order.mode != "windowed":
            self._group_batches = min(self._group_batches, UNSHUFFLED_BATCHES)
        self._window_rows = order.window_rows if order.mode == "windowed" else batch_rows * self._group_batches

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch from position `start` on; earlier rows are prepared and skipped.

        Raises:
            DataError: the stream has another number of rows than the order.
        """
        self._check_start(epoch, start)
        if start < self.num_rows:
            yield from self._read_ahead(epoch, self._batches(epoch, start), only_copies=False)

    def _batches(self, epoch: int, start: int) -> Generator[list[Batch]]:
        """Gather the batches that end in one window together: the next window may take long."""
        batch_rows, sizes = self.part.batch_rows, [self._window_rows] * (self.num_rows // self._window_rows)
        with ExitStack() as held:
            windows = enumerate(held.enter_context(closing(self._windows())))

            def block(index: int) -> Block:
                # Called with rising indices. Skipped windows were consumed before, or belong to other ranks.
                with phase("tasks"):
                    table = next(table for number, table in windows if number == index)
                return {name: column_view(contiguous(table.column(name))) for name in table.column_names}

            rows = RowGather(self.schema.columns, [*sizes, self.num_rows % self._window_rows], block)
            held.callback(rows.close_before, self.num_rows)  # pools hold `rows` until a garbage collection
            pool_rows, ids_at = 1, self._ids_at
            firsts = range(start, self.num_rows, batch_rows)
            cuts: Iterator[tuple[int, int]] = ((first, min(first + batch_rows, self.num_rows)) for first in firsts)
            if self.order.by_length is not None:
                pools = make_pools(self.order.by_length, self.order.seed, rows, self.num_rows, batch_rows, ids_at)
                pool_rows, ids_at, cuts = pools.pool_rows, pools.ids_at, pools.steps(epoch, start)
            for _, ending in itertools.groupby(cuts, lambda cut: (cut[1] - 1) // self._window_rows):
                while group := list(itertools.islice(ending, self._group_batches)):
                    rows.close_before(group[0][0] - group[0][0] % pool_rows)
                    own = own_positions(self.part, group)
                    yield gathered(rows, group, own, ids_at(epoch, np.concatenate(own)))
            with phase("tasks"):
                for _ in windows:  # to the end of the stream, where its rows are counted
                    pass

    def _windows(self) -> Generator[pa.Table]:
        """Cut the rows of an epoch into windows from its first row on, so that a resume sees the same windows."""
        first = 0
        for window in _regrouped(self._tables(), self._window_rows):
            missing = self.num_rows - first
            if window.num_rows > missing:
                raise self._wrong_rows(f"more than {self.num_rows}")
            if window.num_rows < min(self._window_rows, missing):
                raise self._wrong_rows(f"only {first + window.num_rows}")
            yield window
            first += window.num_rows
        if first < self.num_rows:
            raise self._wrong_rows(f"only {first}")

    def _ids_at(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return row ids, counted in the stream, at ascending positions."""
        if self.order.mode == "none" or not len(positions):
            return positions
        windows = positions // self._window_rows
        parts = np.split(positions, np.flatnonzero(np.diff(windows)) + 1)
        return np.concatenate([self._ids_within(epoch, int(part[0]) // self._window_rows, part) for part in parts])

    def _ids_within(self, epoch: int, window: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        first = window * self._window_rows
        rows = min(self._window_rows, self.num_rows - first)
        # The seed includes the window's number, so that every window of an epoch has its own order.
        order = Order(mode="global", seed=hash_words(self.order.seed, window), rows=rows)
        return first + order.ids_at(epoch, positions - first)

    def _tables(self) -> Iterator[pa.Table]:
        for table in self._open_tables():
            yield select_prepared(table, self.schema.columns)

    def _wrong_rows(self, found: str) -> DataError:
        return DataError(
            f"the streamed {self._state.split} split has {found} rows, and {self.num_rows} were counted before",
            next_step="prepare the rows deterministically, or set `materialize.cache` to disk",
        )


def select_prepared(table: pa.Table, columns: Sequence[ColumnInfo]) -> pa.Table:
    """Select `columns` of a prepared table, so that tables of different files can be concatenated.

    Raises:
        DataError: a column is missing or has another type.
    """
    stored = {info.name: info for info in columns_of(table.schema)}
    for column in columns:
        if column.name not in stored:
            raise DataError(f"prepared rows lack column {column.name!r}; they have {table.column_names}")
        if stored[column.name] != column:
            raise DataError(f"prepared rows have a column {stored[column.name]}, the schema has {column}")
    return pa.table({column.name: table.column(column.name) for column in columns})


def _regrouped(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Cut a stream of tables into tables of exactly `rows` rows (the last may be shorter)."""
    held: list[pa.Table] = []
    count = 0
    for table in tables:
        taken = 0
        while taken < table.num_rows:
            held.append(table.slice(taken, rows - count))
            taken, count = taken + held[-1].num_rows, count + held[-1].num_rows
            if count == rows:
                yield pa.concat_tables(held)
                held, count = [], 0
    if count:
        yield pa.concat_tables(held)
