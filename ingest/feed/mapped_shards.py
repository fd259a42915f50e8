"""How do the shards of one split become rows that can be gathered? Mapped where they lie, fetched ahead of need where not.

Shards of a remote storage arrive in the node's cache by several threads at once: all of them for an order that needs all from
the first batch on, and otherwise those of the rows that come next, so that training starts before the dataset has arrived and
goes on in a cache that is smaller than the dataset.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import numpy as np

from penstock.errors import DataError, PreflightError
from penstock.ingest.columns.extension_types import Variable
from penstock.ingest.feed.gather import RowGather
from penstock.ingest.feed.node_cache import LocalShard, NodeCache, allow_open_files, hold_shard
from penstock.ingest.feed.page_advice import free_memory
from penstock.ingest.feed.per_process import PerProcess
from penstock.ingest.manifest import ShardInfo
from penstock.ingest.materialize.shard_file import open_shard
from penstock.ingest.phases import phase
from penstock.ingest.schema import ColumnInfo
from penstock.ingest.shuffle.order import Order
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
) -> RowGather:
    """The rows of shards, each in its storage, to be gathered in `order`.

    Raises:
        DataError: a local shard is missing or has another size than the manifest says.
        PreflightError: the order needs all shards at once, and the node's cache cannot hold them, or the process may not open
            so many files.
    """
    rows = [shard.rows for _, shard in places]
    blocks = ShardBlocks(places, columns)
    for storage, shard in places:
        if storage.is_local:
            hold_shard(storage, shard)
    lists = any(column.ragged for column in columns)
    all_bytes = sum(shard.size_bytes for _, shard in places)
    list_bytes = all_bytes // max(1, sum(rows)) if lists else 0
    room = free_memory() // 2  # the other half is left to other processes
    beyond = order.mode != "none" and all_bytes > room
    # A window is read in long runs while the one before it is used, where both fit.
    two_windows = 2 * order.window_rows * all_bytes // max(1, sum(rows))
    pages_ahead = 0 if not beyond else order.window_rows if 0 < two_windows <= room else PAGES_AHEAD_ROWS
    if all(storage.is_local for storage, _ in places):
        return RowGather(columns, rows, blocks, ahead_rows=pages_ahead, list_bytes=list_bytes, beyond_memory=beyond)
    sizes, cache = [0 if storage.is_local else shard.size_bytes for storage, shard in places], NodeCache()
    budget, many_files = cache.budget_bytes, allow_open_files(len(places))
    if order.mode == "global":
        if not many_files:
            raise PreflightError(
                f"shuffle.mode: global keeps {len(places):,} shards open, more files than a process may open here",
                next_step="raise the limit (ulimit -n), use shuffle.mode: windowed, or larger materialize.shard_bytes",
            )
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
        return RowGather(columns, rows, blocks, ahead_rows=pages_ahead, list_bytes=list_bytes, beyond_memory=beyond)
    if order.mode == "windowed" or order.by_length is not None:  # a step may hold rows of a whole pool
        ahead_rows, ahead_bytes, open_bytes = order.window_rows or SHARDS_AHEAD * max(rows), budget // 4, budget // 2
    else:
        ahead_rows, ahead_bytes, open_bytes = SHARDS_AHEAD * max(rows), SHARDS_AHEAD * max(sizes), SHARDS_OPEN * max(sizes)
    blocks = ShardBlocks(places, columns, max_ahead_bytes=min(ahead_bytes, budget // 4))
    return RowGather(
        columns, rows, blocks, sizes,
        max_open_bytes=open_bytes, fetch=blocks.fetch, ahead_rows=ahead_rows, list_bytes=list_bytes, beyond_memory=beyond,
    )  # fmt: skip


class ShardBlocks:
    """Opens shards as blocks of column views. A view keeps its shard from being evicted.

    To be used by one thread at a time, but for the fetching it does itself.

    Args:
        max_ahead_bytes: so much may be here and not opened yet, of shards fetched ahead; None fetches all that is asked.
    """

    def __init__(
        self,
        places: Sequence[tuple[Storage, ShardInfo]],
        columns: Sequence[ColumnInfo],
        max_ahead_bytes: int | None = None,
    ) -> None:
        self._places = tuple(places)
        self._columns = tuple(columns)
        self._fetcher = PerProcess(partial(_Fetcher, self._places, max_ahead_bytes))

    def fetch(self, indices: Iterable[int], anew: bool = True) -> None:
        """Bring shards to this node, in this order and as far as there is room; an error is raised when the shard is opened.

        Args:
            anew: forget those that were asked for before.
        """
        self._fetcher().want(indices, anew)

    def __call__(self, index: int) -> dict[str, np.ndarray | Variable]:
        """Shard `index` as arrays [rows, *shape], or `Variable`, by column name.

        Raises:
            DataError: the shard is missing or damaged, or is not what its manifest says.
            ServiceError, PreflightError: it cannot be brought here.
        """
        storage, shard = self._places[index]
        with phase("fetch"):
            held = self._fetcher().take(index)
        with phase("read"):
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


class _Fetcher:
    """Brings shards to this node before they are taken, by threads of its own."""

    def __init__(self, places: Sequence[tuple[Storage, ShardInfo]], max_ahead_bytes: int | None) -> None:
        self._places = places
        self._max_ahead_bytes = max_ahead_bytes
        self._wanted: dict[int, None] = {}
        self._coming: dict[int, Future[LocalShard]] = {}
        self._busy = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="penstock-fetch")
        weakref.finalize(self, self._threads.shutdown, wait=False, cancel_futures=True)

    def want(self, indices: Iterable[int], anew: bool) -> None:
        """Fetch these after those that were wanted before, or instead of them."""
        with self._lock:
            if anew:
                self._give_up()
            self._wanted.update((index, None) for index in indices if index not in self._coming)
            self._fetch_more()

    def take(self, index: int) -> LocalShard:
        """The shard, fetched now if it was not. Raises as `hold_shard`."""
        with self._lock:
            self._wanted.pop(index, None)
            coming = self._coming.pop(index, None)
        try:
            shard = coming.result() if coming is not None else hold_shard(*self._places[index])
        except PreflightError:
            # The cache is full of shards that were fetched ahead: this one is needed now.
            with self._lock:
                again, running = self._give_up()
            wait(running)
            running.clear()  # with them the holds on their files go
            shard = hold_shard(*self._places[index])
            with self._lock:
                self._wanted = {**again, **self._wanted}
        with self._lock:
            self._fetch_more()
        return shard

    def fetched(self) -> None:
        """A thread is free."""
        with self._lock:
            self._busy -= 1
            self._fetch_more()

    def _give_up(self) -> tuple[dict[int, None], list[Future[LocalShard]]]:
        """Want nothing any more. Returns what was wanted, and what is still being fetched."""
        wanted = {**dict.fromkeys(self._coming), **self._wanted}
        running = [future for future in self._coming.values() if not future.cancel()]
        self._busy -= len(self._coming) - len(running)
        self._wanted, self._coming = {}, {}
        return wanted, running

    def _fetch_more(self) -> None:
        """Give each free thread something to fetch, and no more than that: a program that ends waits for what was given."""
        ahead_bytes = sum(self._places[index][1].size_bytes for index in self._coming)
        while self._wanted and self._busy < FETCH_THREADS:
            index = next(iter(self._wanted))
            ahead_bytes += self._places[index][1].size_bytes
            if self._max_ahead_bytes is not None and ahead_bytes > self._max_ahead_bytes:
                return
            try:
                self._coming[index] = self._threads.submit(_fetch, weakref.ref(self), *self._places[index])
            except RuntimeError:  # the program ends
                return
            del self._wanted[index]
            self._busy += 1


def _fetch(fetcher: weakref.ref[_Fetcher], storage: Storage, shard: ShardInfo) -> LocalShard:
    try:
        return hold_shard(storage, shard)
    finally:
        if (waiting := fetcher()) is not None:
            waiting.fetched()


class _HeldBlock(dict[str, np.ndarray | Variable]):
    """Column views that live no longer than the hold on their shard."""

    def __init__(self, held: LocalShard) -> None:
        super().__init__()
        self.held = held
