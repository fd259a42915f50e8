"""How do the shards of one split become rows that can be gathered? Mapped where they lie, fetched ahead of need where not.

Shards of a remote storage arrive in the node's cache by several threads at once: all of them for an order that needs all from
the first batch on, and otherwise those of the rows that come next, so that training starts before the dataset has arrived and
goes on in a cache that is smaller than the dataset.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from ingest.beyond_memory import free_memory
from ingest.column_types import Variable
from ingest.dataset import ColumnInfo, ShardInfo
from ingest.gather import Rows
from ingest.order import Order
from ingest.shard_cache import LocalShard, NodeCache, hold_shard
from ingest.shards import open_shard
from penstock.errors import DataError, PreflightError
from penstock.storage import Storage

__all__ = ["FETCH_THREADS", "ShardBlocks", "shard_rows"]

FETCH_THREADS = 8
"""Shards on their way at once: a store answers many requests at a time, and one connection is slow."""

PAGES_AHEAD_ROWS = 8192
"""How many rows ahead pages are read, row by row, where memory holds neither all of them nor two windows."""

SHARDS_AHEAD = 4
"""How far ahead shards are fetched that are read one after the other."""

SHARDS_OPEN = 2
"""How many of these are held at once: a batch may end one and begin the next."""


def shard_rows(
    places: Sequence[tuple[Storage, ShardInfo]],
    columns: Sequence[ColumnInfo],
    order: Order,
    rank: int = 0,
    world_size: int = 1,
) -> Rows:
    """The rows of shards, each in its storage, to be gathered in `order`.

    Raises:
        DataError: a local shard is missing or has another size than the manifest says.
        PreflightError: the order needs all shards at once, and the node's cache cannot hold them.
    """
    rows = [shard.rows for _, shard in places]
    blocks = ShardBlocks(places, columns)
    for storage, shard in places:
        if storage.is_local:
            hold_shard(storage, shard)
    lists = any(column.ragged for column in columns)
    all_bytes = sum(shard.size_bytes for _, shard in places)
    list_bytes = all_bytes // max(1, sum(rows)) if lists else 0
    room = free_memory() // 2  # the other half is for whoever else needs some
    beyond = order.mode != "none" and all_bytes > room
    # A window is read in long runs while the one before it is used, where both fit.
    two_windows = 2 * order.window_rows * all_bytes // max(1, sum(rows))
    pages_ahead = 0 if not beyond else order.window_rows if 0 < two_windows <= room else PAGES_AHEAD_ROWS
    if all(storage.is_local for storage, _ in places):
        return Rows(columns, rows, blocks, ahead_rows=pages_ahead, list_bytes=list_bytes, beyond_memory=beyond)
    sizes, cache = [0 if storage.is_local else shard.size_bytes for storage, shard in places], NodeCache()
    budget = cache.budget_bytes
    if order.mode == "global":
        # Validation reads its rows one shard after the other, in the same cache and the same minutes.
        needed = sum(sizes) + (SHARDS_OPEN + SHARDS_AHEAD) * max(sizes)
        if needed > budget:
            raise PreflightError(
                f"shuffle.mode: global needs all {sum(sizes) / 1e6:,.0f} MB of the split on every node and some shards beside "
                f"them, {needed / 1e6:,.0f} MB in all, and the cache in {cache.folder} may hold {budget / 1e6:,.0f} MB",
                next_step="use shuffle.mode: windowed, raise PENSTOCK_CACHE_BYTES, or give PENSTOCK_CACHE_DIR a larger disk",
            )
        # Each rank of a node begins elsewhere: together they fetch every shard once.
        first = rank * len(places) // world_size
        blocks.fetch([*range(first, len(places)), *range(first)])
        return Rows(columns, rows, blocks, ahead_rows=pages_ahead, list_bytes=list_bytes, beyond_memory=beyond)
    if order.mode == "windowed" or order.by_length is not None:  # a step may hold rows of a whole pool
        ahead_rows, ahead_bytes, open_bytes = order.window_rows or SHARDS_AHEAD * max(rows), budget // 4, budget // 2
    else:
        ahead_rows, ahead_bytes, open_bytes = SHARDS_AHEAD * max(rows), SHARDS_AHEAD * max(sizes), SHARDS_OPEN * max(sizes)
    blocks = ShardBlocks(places, columns, max_ahead_bytes=min(ahead_bytes, budget // 4))
    return Rows(
        columns, rows, blocks, sizes,
        max_open_bytes=open_bytes, fetch=blocks.fetch, ahead_rows=ahead_rows, list_bytes=list_bytes, beyond_memory=beyond,
    )  # fmt: skip


class ShardBlocks:
    """Opens shards as blocks of column views. A view keeps its shard from being evicted.

    Not to be shared between threads, but for the fetching it does itself.

    Args:
        max_ahead_bytes: shards beyond so many of them are not fetched before they are opened; None fetches all that is asked.
    """

    def __init__(
        self,
        places: Sequence[tuple[Storage, ShardInfo]],
        columns: Sequence[ColumnInfo],
        max_ahead_bytes: int | None = None,
    ) -> None:
        self._places = tuple(places)
        self._columns = tuple(columns)
        self._max_ahead_bytes = max_ahead_bytes
        self._coming: dict[int, Future[LocalShard]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def fetch(self, indices: Iterable[int]) -> None:
        """Begin to bring shards to this node; an error is raised when the shard is opened."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="penstock-fetch")
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        ahead_bytes = sum(self._places[index][1].size_bytes for index in self._coming)
        for index in indices:
            if index not in self._coming:
                ahead_bytes += self._places[index][1].size_bytes
                if self._max_ahead_bytes is not None and ahead_bytes > self._max_ahead_bytes:
                    return
                self._coming[index] = self._pool.submit(hold_shard, *self._places[index])

    def __call__(self, index: int) -> dict[str, np.ndarray | Variable]:
        """Shard `index` as arrays [rows, *shape], or `Variable`, by column name.

        Raises:
            DataError: the shard is missing or damaged, or is not what its manifest says.
            ServiceError, PreflightError: it cannot be brought here.
        """
        storage, shard = self._places[index]
        held = self._hold(index)
        reader = open_shard(held.path)
        block = _HeldBlock(held)
        for column in self._columns:
            try:
                view = reader.column(column.name)
            except KeyError as error:
                raise DataError(f"shard {storage.uri(shard.path)}: {error.args[0]}") from error
            stored = next(info for info in reader.columns if info.name == column.name)
            if reader.rows != shard.rows or stored != column:
                raise DataError(
                    f"shard {storage.uri(shard.path)} holds {reader.rows:,} rows of {stored}, its manifest says "
                    f"{shard.rows:,} rows of {column}"
                )
            block[column.name] = view
        return block

    def _hold(self, index: int) -> LocalShard:
        coming = self._coming.pop(index, None)
        try:
            return coming.result() if coming is not None else hold_shard(*self._places[index])
        except PreflightError:
            # The cache is full of shards that were fetched ahead: this one is needed now.
            ahead, self._coming = self._coming, {}
            wait([future for future in ahead.values() if not future.cancel()])
            ahead.clear()  # with them the holds on their files go
            return hold_shard(*self._places[index])


class _HeldBlock(dict[str, np.ndarray | Variable]):
    """Column views that live no longer than the hold on their shard."""

    def __init__(self, held: LocalShard) -> None:
        super().__init__()
        self.held = held
