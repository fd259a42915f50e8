"""How does a training worker read rows that are not cached on disk: from Ray's object store, or prepared anew each epoch?

`MemoryFeed` (`cache: memory`) is the cached feed over blocks in the object store: the same order, the same exact resume. The
blocks live as long as the Ray cluster and the process that put them there; after a driver restart they are prepared again, and
a state continues only if the content is the same.

`StreamFeed` (`cache: none`) prepares the rows anew once per epoch and rank, in Ray tasks. What it promises, and what not:
- Every row once per epoch over all ranks, in one order for every world size, if preparing is deterministic.
- Each rank prepares all rows and keeps its share, so W workers prepare every row W times. Nothing couples the ranks: none can
  hold up another, and no rows are dropped to make shares equal, as Ray Data's `streaming_split` does.
- Shuffling reaches as far as `shuffle.window_rows` rows, which each rank holds in memory; no order of the whole split. Steps
  by length hold two pools of rows (`shuffle.by_length.pool_batches`) besides. Images that stay encoded are held encoded.
- A resume prepares the epoch's rows from the start again and skips those already consumed. Where reading stops early, the tasks
  that were begun, at most `tasks`, prepare the rest of their items in vain, unless the process ends.
- Ray tasks need CPUs that the training workers do not hold, or the first batch never comes. A stream runs at most `tasks` of
  them at a time, because a task that waits for its reader keeps its CPUs: without a bound one rank's tasks can hold all CPUs
  while that rank waits for another. `streams_cpus` is what must be left free.
- Plain tasks, not a Ray Data pipeline: that begins its first epoch two seconds later, and ends a reading that stops early with
  `ray.cancel`, which aborts the reading process if a task ends at that moment (Ray 2.60; see `penstock.ingest.ray_tasks`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray

from penstock.errors import DataError, SpecError
from penstock.ingest.columns.arrays import Block, column_view, columns_of, contiguous
from penstock.ingest.feed.batch import Batch, FeedShare
from penstock.ingest.feed.cached import batches_at_once, gathered, make_pools, own_positions, select_columns
from penstock.ingest.feed.cursor import FeedCursor
from penstock.ingest.feed.gather import RowGather, fixed_bytes
from penstock.ingest.phases import counting, from_metadata, phase, running_clock, to_metadata
from penstock.ingest.ray_tasks import raising_the_original, ray_streams
from penstock.ingest.schema import ColumnInfo, FeedSchema, Split
from penstock.ingest.shuffle.length_pools import find_column
from penstock.ingest.shuffle.order import Order
from penstock.ingest.splitmix import hash_words

__all__ = ["STREAM_CPUS", "StreamFeed", "stream_tasks", "streamed", "streams_cpus"]


STREAM_CPUS = 0.25
"""CPUs one preparing task of a stream asks for: tasks must fit beside workers that hold whole CPUs."""

STREAMS_PER_RANK = 2
"""A rank reads the validation split while its place in the train split stays open."""

TABLES_AHEAD = 2
"""A stream's task makes so many tables before it waits for its reader; one takes 16 MB, or more where rows are large."""

UNSHUFFLED_BATCHES = 4
"""So many batches of a stream in its own order are gathered at once: each waits for all of them, and rows may be slow."""

T = TypeVar("T")


def streamed(
    items: Sequence[T], tables_of: Callable[[T], Iterator[pa.Table]], num_cpus: float = STREAM_CPUS, tasks: int = 1
) -> Callable[[], Iterator[pa.Table]]:
    """Describe how the rows of `items` (source files, or commit units) are prepared in order, in one Ray task each.

    Args:
        tables_of: gives an item's prepared rows as tables of columns as a shard holds them; must give equal rows every time.
        num_cpus: CPUs one task asks for.
        tasks: how many may run at a time; the order of rows does not depend on it.

    Returns:
        A function that begins an epoch's preparing, to be called in the process that reads it. It pickles.
    """
    return partial(_prepared, list(items), tables_of, num_cpus, tasks)


def _prepared(
    items: Sequence[T], tables_of: Callable[[T], Iterator[pa.Table]], num_cpus: float, tasks: int
) -> Generator[pa.Table]:
    clock = running_clock()
    if clock is not None:
        tables_of = partial(_counted, tables_of)
    for references in ray_streams(tables_of, items, num_cpus=num_cpus, at_once=tasks, ahead=TABLES_AHEAD):
        for reference in references:
            with phase("tasks"), raising_the_original():
                table: pa.Table = ray.get(reference)
            if clock is not None:
                for name, spent_s in from_metadata(table.schema.metadata).items():
                    clock.in_tasks[name] += spent_s
            yield table


def _counted(tables_of: Callable[[T], Iterator[pa.Table]], item: T) -> Iterator[pa.Table]:
    """The tables of an item, each with what its making took. Runs in a task, the only one of its process."""
    with counting() as clock:
        for table in tables_of(item):
            yield table.replace_schema_metadata({**(table.schema.metadata or {}), **to_metadata(clock.take())})


def streams_cpus(ranks: int) -> float:
    """CPUs that must be left free of training workers so that every stream of `ranks` ranks can run one task."""
    return ranks * STREAMS_PER_RANK * STREAM_CPUS


def stream_tasks(ranks: int, free_cpus: float) -> int:
    """How many tasks each stream of `ranks` ranks may run at a time, one CPU's work each, in `free_cpus`; at least 1."""
    return max(1, int(free_cpus / (ranks * STREAMS_PER_RANK)))


class StreamFeed(FeedCursor):
    """Reads rows that are prepared anew every epoch. See the module's docstring for its promises and their limits.

    Args:
        open_tables: begins an epoch's preparing (`streamed`, or any other way); the same rows in the same order each time.
        order: mode `none`, or `windowed` over `window_rows` consecutive rows of the stream; `rows` is the split's row count.
        content: digest of what the rows depend on, for example the key of the preprocess stage.
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
                "`shuffle.mode: global` needs rows that can be found by number, `materialize.cache: none` streams them",
                next_step="set `shuffle.mode` to windowed or none, or `materialize.cache` to disk or memory",
            )
        part = FeedShare(batch_rows, rank, world_size, prefetch)
        super().__init__(select_columns(schema, columns), split, content, order, part)
        if order.by_length is not None:
            find_column(order.by_length, self.schema.columns)
        self._open_tables = open_tables
        # How long the lists of rows to come are is unknown: their batches are gathered one by one.
        lists = any(column.ragged for column in self.schema.columns)
        self._group_batches = 1 if lists else batches_at_once(part, fixed_bytes(self.schema.columns))
        if order.mode != "windowed":
            self._group_batches = min(self._group_batches, UNSHUFFLED_BATCHES)
        self._window_rows = order.window_rows if order.mode == "windowed" else batch_rows * self._group_batches

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch from position `start` on; the rows before are prepared and skipped.

        Raises:
            DataError: other rows come than the order is made for.
        """
        self._check_start(epoch, start)
        if start < self.num_rows:
            yield from self._handed_over(epoch, self._batches(epoch, start), gathers_only=False)

    def _batches(self, epoch: int, start: int) -> Generator[list[Batch]]:
        """Gather together what ends in one window, for the next one may be long in coming."""
        batch_rows, sizes = self.part.batch_rows, [self._window_rows] * (self.num_rows // self._window_rows)
        with ExitStack() as held:
            windows = enumerate(held.enter_context(closing(self._windows())))

            def block(index: int) -> Block:
                # Asked for in rising order. Windows that are passed over were consumed before, or are for other ranks.
                with phase("tasks"):
                    table = next(table for number, table in windows if number == index)
                return {name: column_view(contiguous(table.column(name))) for name in table.column_names}

            rows = RowGather(self.schema.columns, [*sizes, self.num_rows % self._window_rows], block)
            held.callback(rows.let_go, self.num_rows)  # the pools, which hold `rows`, wait for the garbage collection
            pool_rows, ids_at = 1, self._ids_at
            firsts = range(start, self.num_rows, batch_rows)
            cuts: Iterator[tuple[int, int]] = ((first, min(first + batch_rows, self.num_rows)) for first in firsts)
            if self.order.by_length is not None:
                pools = make_pools(self.order.by_length, self.order.seed, rows, self.num_rows, batch_rows, ids_at)
                pool_rows, ids_at, cuts = pools.pool_rows, pools.ids_at, pools.steps(epoch, start)
            for _, ending in itertools.groupby(cuts, lambda cut: (cut[1] - 1) // self._window_rows):
                while group := list(itertools.islice(ending, self._group_batches)):
                    rows.let_go(group[0][0] - group[0][0] % pool_rows)
                    yield gathered(rows, self.part, group, ids_at(epoch, own_positions(self.part, group)))
            with phase("tasks"):
                for _ in windows:  # to the stream's end, where its rows are counted
                    pass

    def _windows(self) -> Generator[pa.Table]:
        """The rows of an epoch, cut up from its first row on, so that a resume sees the same windows."""
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
        """Row ids, counted in the stream, at ascending positions."""
        if self.order.mode == "none" or not len(positions):
            return positions
        windows = positions // self._window_rows
        parts = np.split(positions, np.flatnonzero(np.diff(windows)) + 1)
        return np.concatenate([self._ids_within(epoch, int(part[0]) // self._window_rows, part) for part in parts])

    def _ids_within(self, epoch: int, window: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        first = window * self._window_rows
        rows = min(self._window_rows, self.num_rows - first)
        # The window's number takes part in the seed, so that every window of an epoch has an order of its own.
        order = Order(mode="global", seed=hash_words(self.order.seed, window), rows=rows)
        return first + order.ids_at(epoch, positions - first)

    def _tables(self) -> Iterator[pa.Table]:
        for table in self._open_tables():
            yield select_prepared(table, self.schema.columns)

    def _wrong_rows(self, found: str) -> DataError:
        return DataError(
            f"the streamed {self._state.split} split gives {found} rows where {self.num_rows} were counted",
            next_step="prepare the rows deterministically, or set `materialize.cache` to disk",
        )


def select_prepared(table: pa.Table, columns: Sequence[ColumnInfo]) -> pa.Table:
    """Only `columns` of a prepared table, so that tables of different files can be put together.

    Raises:
        DataError: a column is missing or is another one.
    """
    stored = {info.name: info for info in columns_of(table.schema)}
    for column in columns:
        if column.name not in stored:
            raise DataError(f"prepared rows lack column {column.name!r}; they have {table.column_names}")
        if stored[column.name] != column:
            raise DataError(f"prepared rows have a column {stored[column.name]}, the schema says {column}")
    return pa.table({column.name: table.column(column.name) for column in columns})


def _regrouped(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Cut a stream of tables into tables of exactly `rows` rows (the last may be shorter), whatever the sizes they come in."""
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
