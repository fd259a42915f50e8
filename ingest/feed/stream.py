"""How does a training worker read rows that no disk caches: from Ray's object store, or prepared again each epoch?

`MemoryFeed` (`cache: memory`) is the cached feed over blocks in the object store. The blocks live as long as the Ray cluster
and the process that put them there. After a restart of the driver they are prepared again, and a state continues if the content
is equal.

`StreamFeed` (`cache: none`, in one lane; for several see ingest/feed/stream_lanes.py) prepares the rows in Ray tasks, once per
epoch (`penstock.ingest.feed.stream_tasks`):
- If preparing is deterministic, every row comes once per epoch over all ranks, in one order for every world size.
- All ranks read one stream: a row is prepared once, and each rank keeps its share of it.
- Shuffling reaches as far as `shuffle.window_rows` rows, which each rank holds in memory; steps by length also hold two pools.
- A resume begins with the unit of the window's first row: a file, or a piece of a file that can be read from within (row
  groups, shards, recorded offsets). Units before it are not prepared again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Unpack

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray

from penstock.errors import DataError, SpecError
from penstock.ingest.columns.arrays import Block, column_view, columns_of, contiguous, rebatched
from penstock.ingest.feed.batch import Batch, FeedShare, ShareArguments, own_positions
from penstock.ingest.feed.cached import CachedFeed, batches_at_once, gathered, make_pools, select_columns
from penstock.ingest.feed.cursor import Feed
from penstock.ingest.feed.gather import RowGather, fixed_bytes
from penstock.ingest.materialize.without_disk import MemoryDataset
from penstock.ingest.phases import phase
from penstock.ingest.schema import ColumnInfo, FeedSchema, Split
from penstock.ingest.shuffle.length_pools import find_column
from penstock.ingest.shuffle.order import Order
from penstock.ingest.splitmix import hash_words

__all__ = ["MemoryFeed", "OpenTables", "StreamFeed"]

UNSHUFFLED_BATCHES = 4
"""Most batches gathered at once from an unshuffled stream: each waits for all of them, and rows may be slow."""

OpenTables = Callable[[int, int], tuple[int, Iterator[pa.Table]]]
"""(epoch, row) -> a row at or before it, and the prepared rows from there on: the same rows in the same order each time."""


class MemoryFeed(CachedFeed):
    """Reads a `MemoryDataset`. Blocks are mapped from the node's object store without a copy."""

    def __init__(
        self, dataset: MemoryDataset, *, order: Order, columns: Sequence[str] | None = None, **share: Unpack[ShareArguments]
    ) -> None:
        schema = select_columns(dataset.schema, columns)
        list_bytes = dataset.size_bytes // max(1, dataset.num_rows) if any(column.varies for column in schema.columns) else 0

        def block(index: int) -> Block:
            with phase("fetch"):  # from another node if this one does not have it
                found: Block = ray.get(dataset.blocks[index])
                return found

        rows = RowGather(schema.columns, dataset.block_rows, block, list_bytes=list_bytes)
        super().__init__(schema, dataset.split, dataset.content, rows, order, FeedShare(**share))


class StreamFeed(Feed):
    """Reads rows that are prepared again every epoch. See the module's docstring for its promises and their limits.

    Args:
        open_tables: starts to prepare an epoch (for example `stream_tasks.StreamTables`).
        order: mode `none`, or `windowed` over `window_rows` consecutive rows of the stream; `rows` is the split's row count.
        content: digest of everything that the rows depend on, for example the key of the preprocess stage.
        prefetch: groups of batches made ahead in a thread; 0 uses none.

    Raises:
        SpecError: an order of mode `global`.
    """

    def __init__(
        self,
        open_tables: OpenTables,
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

    def _groups(self, epoch: int, start: int) -> Generator[list[Batch]]:
        """Gather the batches that end in one window together: the next window may take long."""
        batch_rows, sizes = self.part.batch_rows, [self._window_rows] * (self.num_rows // self._window_rows)
        pool_rows = batch_rows * self.order.by_length.pool_batches if self.order.by_length is not None else 1
        first_window = (start - start % pool_rows) // self._window_rows
        with ExitStack() as held:
            windows = enumerate(held.enter_context(closing(self._windows(epoch, first_window))), first_window)

            def block(index: int) -> Block:
                # Called with rising indices. Skipped windows were consumed before, or belong to other ranks.
                with phase("tasks"):
                    table = next(table for number, table in windows if number == index)
                return {name: column_view(contiguous(table.column(name))) for name in table.column_names}

            rows = RowGather(self.schema.columns, [*sizes, self.num_rows % self._window_rows], block)
            held.callback(rows.close_before, self.num_rows)  # pools hold `rows` until a garbage collection
            ids_at = self._ids_at
            firsts = range(start, self.num_rows, batch_rows)
            cuts: Iterator[tuple[int, int]] = ((first, min(first + batch_rows, self.num_rows)) for first in firsts)
            if self.order.by_length is not None:
                pools = make_pools(self.order.by_length, self.order.seed, rows, self.num_rows, batch_rows, ids_at)
                ids_at, cuts = pools.ids_at, pools.steps(epoch, start)
            for _, ending in itertools.groupby(cuts, lambda cut: (cut[1] - 1) // self._window_rows):
                while group := list(itertools.islice(ending, self._group_batches)):
                    rows.close_before(group[0][0] - group[0][0] % pool_rows)
                    own = own_positions(self.part, group)
                    yield gathered(rows, group, own, ids_at(epoch, np.concatenate(own)))
            with phase("tasks"):
                for _ in windows:  # to the end of the stream, where its rows are counted
                    pass

    def _windows(self, epoch: int, number: int) -> Generator[pa.Table]:
        """Cut the rows of an epoch into windows, counted from its first row, from window `number` on."""
        first = number * self._window_rows
        for window in rebatched(self._tables(epoch, first), self._window_rows):
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

    def _tables(self, epoch: int, first: int) -> Iterator[pa.Table]:
        """Yield the rows from row `first` on."""
        row, tables = self._open_tables(epoch, first)
        for table in tables:
            skipped = min(max(0, first - row), table.num_rows)
            row += table.num_rows
            if skipped < table.num_rows:
                yield select_prepared(table.slice(skipped), self.schema.columns)

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
