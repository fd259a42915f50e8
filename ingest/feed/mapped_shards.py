"""How are the shards of one split opened for gathering? Local shards are mapped in place; remote shards are fetched ahead.

Several threads fetch remote shards into the node's cache: all shards of the rank's lanes for a global order, otherwise those of
the next rows, so that training starts before all are here, and the cache may be smaller than the dataset.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError, PreflightError
from penstock.ingest.columns.extension_types import Variable
from penstock.ingest.feed.batch import FeedShare
from penstock.ingest.feed.gather import RowGather
from penstock.ingest.feed.node_cache import LocalShard, NodeCache, allow_open_files, hold_shard
from penstock.ingest.feed.page_advice import free_memory
from penstock.ingest.manifest import ShardInfo, Shards
from penstock.ingest.materialize.shard_file import open_shard
from penstock.ingest.phases import count_fetched, phase
from penstock.ingest.schema import ColumnInfo
from penstock.ingest.shuffle.lanes import lanes_of
from penstock.ingest.shuffle.order import Order
from penstock.storage import Storage

__all__ = ["FETCH_THREADS", "ShardBlocks", "ShardPlaces", "most_of_a_rank", "shard_rows"]

FETCH_THREADS = 8
"""Shards fetched at once: one connection to a store is slow, many are not."""

PAGES_AHEAD_ROWS = 8192
"""Rows whose pages are prefetched if memory holds neither all rows nor two windows."""

PAGES_AHEAD_BYTES = 512 << 20
"""Or fewer, if they take more than this: what is prefetched must stay in memory until it is read."""

SHARDS_AHEAD = 4
"""Shards fetched ahead if they are read one after the other."""

SHARDS_OPEN = 2
"""Of these, shards held at once: a batch may end one and begin the next."""


class ShardPlaces:
    """The shards of a split, in row order, over one or several datasets; each with its storage, made when it is asked for.

    Attributes:
        parts: storage and shards of each dataset.
        rows: of each shard, int64 [shards].
        size_bytes: of each shard, int64 [shards].
    """

    def __init__(self, parts: Sequence[tuple[Storage, Shards]]) -> None:
        self.parts = parts
        self.rows, self.size_bytes = parts[0][1].rows, parts[0][1].size_bytes  # mapped: not copied
        if len(parts) > 1:
            self.rows = np.concatenate([shards.rows for _, shards in parts])
            self.size_bytes = np.concatenate([shards.size_bytes for _, shards in parts])
        self._ends = np.cumsum([len(shards) for _, shards in parts])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Storage, ShardInfo]:
        part = int(np.searchsorted(self._ends, index, side="right"))
        if part == len(self.parts):
            raise IndexError(index)
        storage, shards = self.parts[part]
        return storage, shards[index - int(self._ends[part])]  # counted from the end of its dataset


def shard_rows(
    places: ShardPlaces, columns: Sequence[ColumnInfo], order: Order, rank: int = 0, world_size: int = 1
) -> RowGather:
    """Make the rows of shards, each in its storage, ready to be gathered in `order`.

    Raises:
        DataError: a local shard is missing or has another size than in the manifest.
        PreflightError: the order needs all shards at once, and the node's cache cannot hold them, or the process may not open
            so many files.
    """
    rows = places.rows
    is_local = np.repeat([storage.is_local for storage, _ in places.parts], [len(shards) for _, shards in places.parts])
    blocks = ShardBlocks(places, columns)
    own, on_node = (np.arange(len(places)),) * 2
    if order.lanes > 1:
        own = order.lane_rows.shards_of(*lanes_of(rank, world_size, order.lanes))
        on_node = order.lane_rows.shards_of(*_node_lanes(order, rank, world_size))
    for index in own[is_local[own]].tolist():
        if not places[index][1].is_pending:
            hold_shard(*places[index])
    lists = any(column.varies for column in columns)
    all_bytes, all_rows = int(places.size_bytes.sum()), max(1, int(rows.sum()))
    list_bytes = all_bytes // all_rows if lists else 0
    room = free_memory() // 2  # the other half is left to other processes
    beyond = order.mode != "none" and all_bytes > room
    # If two windows fit, the next one is prefetched in long runs while the current one is used.
    two_windows = 2 * order.window_rows * all_bytes // all_rows
    most_ahead = min(PAGES_AHEAD_ROWS, max(1, PAGES_AHEAD_BYTES * all_rows // max(1, all_bytes)))
    pages_ahead = 0 if not beyond else order.window_rows if 0 < two_windows <= room else most_ahead
    if is_local.all():
        return RowGather(columns, rows, blocks, ahead_rows=pages_ahead, list_bytes=list_bytes, beyond_memory=beyond)
    sizes, cache = np.where(is_local, 0, places.size_bytes), NodeCache()
    most_bytes, most_rows = int(sizes.max()), int(rows.max())
    budget, many_files = cache.budget_bytes, allow_open_files(len(own))
    if order.mode == "global":
        if not many_files:
            raise PreflightError(
                f"shuffle.mode: global keeps {len(own):,} shards open, more files than a process may open here",
                next_step="raise the limit (ulimit -n), use shuffle.mode: windowed, or larger materialize.shard_bytes",
            )
        # Validation reads shard by shard through the same cache at the same time.
        share_bytes = int(sizes[on_node].sum())
        needed = share_bytes + (SHARDS_OPEN + SHARDS_AHEAD) * most_bytes
        if needed > budget:
            part = "all" if order.lanes == 1 else "this node's"
            raise PreflightError(
                f"shuffle.mode: global needs {part} {share_bytes / 1e6:,.0f} MB of the split and some more shards on every "
                f"node, {needed / 1e6:,.0f} MB in all; the cache in {cache.folder} may hold {budget / 1e6:,.0f} MB",
                next_step="use shuffle.mode: windowed, raise PENSTOCK_CACHE_BYTES, or give PENSTOCK_CACHE_DIR a larger disk",
            )
        # Each rank begins with another shard: together the ranks of a node fetch every shard once.
        first = rank * len(own) // world_size
        blocks.fetcher.want(np.roll(own, -first).tolist(), reset=True)
        return RowGather(columns, rows, blocks, ahead_rows=pages_ahead, list_bytes=list_bytes, beyond_memory=beyond)
    if order.mode == "windowed" or order.by_length is not None:  # a step may hold rows of a whole pool
        ahead_rows, ahead_bytes, open_bytes = order.window_rows or SHARDS_AHEAD * most_rows, budget // 4, budget // 2
        if order.lanes > 1:
            ahead_rows = order.lane_rows.window_rows
            low, high = _node_lanes(order, rank, world_size)
            shards_at_once = min(len(on_node), (high - low) * order.lane_rows.parts_at_once)
            needed = shards_at_once * int(sizes.sum()) // len(sizes)
            if needed > open_bytes:
                raise PreflightError(
                    f"the windows of {order.lanes} lanes need about {shards_at_once:,} shards at once on a node, "
                    f"{needed / 1e6:,.0f} MB; the cache in {cache.folder} may hold {open_bytes / 1e6:,.0f} MB of shards in use",
                    next_step="set fewer shuffle.lanes, a smaller materialize.shard_bytes or shuffle.window_rows, or raise "
                    "PENSTOCK_CACHE_BYTES",
                )
    else:
        ahead_rows = SHARDS_AHEAD * most_rows * order.lanes
        ahead_bytes, open_bytes = SHARDS_AHEAD * most_bytes, SHARDS_OPEN * most_bytes
    blocks = ShardBlocks(places, columns, max_ahead_bytes=min(ahead_bytes, budget // 4))
    return RowGather(
        columns, rows, blocks, sizes, max_open_bytes=open_bytes, fetch=blocks.fetcher.want,
        ahead_rows=ahead_rows, list_bytes=list_bytes, beyond_memory=beyond,
    )  # fmt: skip


def most_of_a_rank(order: Order, sizes: NDArray[np.int64], part: FeedShare) -> dict[str, int]:
    """Return the rows of an epoch, the bytes to read and those of shards open at once, of the rank with most of them.

    Args:
        sizes: bytes of each shard.
        part: of any rank.
    """
    whole, world_size = int(sizes.sum()), part.world_size
    one = whole / len(sizes)
    batches, last = divmod(positions := part.positions(order.epoch_rows), part.batch_rows)
    rows = batches * -(-part.batch_rows // world_size) + -(-last // world_size)
    at_once = 2 if order.mode == "none" else len(sizes)
    if order.lanes == 1:
        if order.mode == "windowed" and order.shards.count:
            at_once = min(len(sizes), math.ceil(order.window_rows * len(sizes) / order.rows) + 1)
        return {"rows": rows, "fetch_bytes": whole, "disk_bytes": int(at_once * one)}
    ranges = [lanes_of(rank, world_size, order.lanes) for rank in range(world_size)]
    most = max(high - low for low, high in ranges)
    if world_size <= order.lanes:
        each, more = divmod(positions, order.lanes)  # the first lanes have a row more
        rows = max((high - low) * each + min(max(0, more - low), high - low) for low, high in ranges)
    with_most = list(dict.fromkeys((low, high) for low, high in ranges if high - low == most))
    found = []
    for low, high in with_most[:: -(-len(with_most) // 16)]:  # some of many: their shards differ by a few
        fetched = int(sizes[order.lane_rows.shards_of(low, high)].sum())
        windows = fetched if order.mode == "global" else int((high - low) * order.lane_rows.parts_at_once * one)
        found.append({"rows": rows, "fetch_bytes": fetched, "disk_bytes": min(fetched, windows)})
    return {name: max(each[name] for each in found) for name in found[0]}


def _node_lanes(order: Order, rank: int, world_size: int) -> tuple[int, int]:
    """Return the range of the lanes of all ranks on this node, as far as the launcher (Ray Train, torchrun) names them."""
    local_rank, local_ranks = (int(os.environ.get(name, 0)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    first, last = rank - local_rank, rank - local_rank + local_ranks - 1
    if not 0 <= first <= rank <= last < world_size:
        first = last = rank
    return lanes_of(first, world_size, order.lanes)[0], lanes_of(last, world_size, order.lanes)[1]


class ShardBlocks:
    """Opens shards as blocks of column views; a block keeps its shard from being evicted. For one thread at a time.

    Args:
        max_ahead_bytes: most bytes of shards that are fetched and not yet opened; None for no limit.

    Attributes:
        fetcher: fetches shards ahead; its errors are raised when the shard is opened.
    """

    def __init__(self, places: ShardPlaces, columns: Sequence[ColumnInfo], max_ahead_bytes: int | None = None) -> None:
        self._places = places
        self._columns = tuple(columns)
        self.fetcher = _Fetcher(places, max_ahead_bytes)

    def __call__(self, index: int) -> dict[str, np.ndarray | Variable]:
        """Open shard `index` as arrays [rows, *shape], or `Variable`, by column name.

        Raises:
            DataError: the shard is missing, damaged, or differs from its manifest.
            ServiceError, PreflightError: it cannot be fetched.
        """
        storage, shard = self._places[index]
        began_s = time.perf_counter()
        with phase("fetch"):
            held = self.fetcher.take(index)
        if not storage.is_local:
            count_fetched(wait_s=time.perf_counter() - began_s)
        with phase("read"):
            reader = open_shard(held.path)
        block, stored_as = _HeldBlock(held), {info.name: info for info in reader.columns}
        for column in self._columns:
            try:
                view = reader.column(column.name)
            except KeyError as error:
                raise DataError(f"shard {storage.uri(shard.path)}: {error.args[0]}") from error
            stored = stored_as[column.name]
            if reader.rows != shard.rows or stored != column:
                raise DataError(
                    f"shard {storage.uri(shard.path)} holds {reader.rows:,} rows of {stored}, the manifest lists "
                    f"{shard.rows:,} rows of {column}"
                )
            block[column.name] = view
        return block


class _Fetcher:
    """Fetches shards to this node ahead, in its own threads."""

    def __init__(self, places: ShardPlaces, max_ahead_bytes: int | None) -> None:
        self._places = places
        self._max_ahead_bytes = max_ahead_bytes
        self._wanted: dict[int, None] = {}
        self._fetching: dict[int, Future[LocalShard]] = {}
        self._busy = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="penstock-fetch")
        weakref.finalize(self, self._threads.shutdown, wait=False, cancel_futures=True)

    def want(self, indices: Iterable[int], reset: bool) -> None:
        """Fetch these in order, as far as the cache has room; with `reset` instead of the earlier requests, else after."""
        with self._lock:
            if reset:
                self._cancel()
            self._wanted.update((index, None) for index in indices if index not in self._fetching)
            self._fetch_more()

    def take(self, index: int) -> LocalShard:
        """Return the shard; fetch it now if it was not requested before. Raises as `hold_shard`."""
        with self._lock:
            self._wanted.pop(index, None)
            fetching = self._fetching.pop(index, None)
        try:
            shard = fetching.result() if fetching is not None else hold_shard(*self._places[index])
        except PreflightError:
            # The cache is full of shards fetched ahead: release them, this one is needed now.
            with self._lock:
                again, running = self._cancel()
            wait(running)
            running.clear()  # releases the files
            shard = hold_shard(*self._places[index])
            with self._lock:
                self._wanted = {**again, **self._wanted}
        with self._lock:
            self._fetch_more()
        return shard

    def thread_is_free(self) -> None:
        """Start the next fetch."""
        with self._lock:
            self._busy -= 1
            self._fetch_more()

    def _cancel(self) -> tuple[dict[int, None], list[Future[LocalShard]]]:
        """Drop all requests. Returns them, and the fetches that are running."""
        wanted = {**dict.fromkeys(self._fetching), **self._wanted}
        running = [future for future in self._fetching.values() if not future.cancel()]
        self._busy -= len(self._fetching) - len(running)
        self._wanted, self._fetching = {}, {}
        return wanted, running

    def _fetch_more(self) -> None:
        """Give each free thread one shard, and no more: at its end a program waits for the submitted fetches."""
        sizes, most = self._places.size_bytes, self._max_ahead_bytes
        ahead_bytes = sum(int(sizes[index]) for index in self._fetching) if most is not None else 0
        while self._wanted and self._busy < FETCH_THREADS:
            index = next(iter(self._wanted))
            ahead_bytes += int(sizes[index])
            if most is not None and ahead_bytes > most:
                return
            try:
                self._fetching[index] = self._threads.submit(_fetch, weakref.ref(self), *self._places[index])
            except RuntimeError:  # the program is ending
                return
            del self._wanted[index]
            self._busy += 1


def _fetch(fetcher: weakref.ref[_Fetcher], storage: Storage, shard: ShardInfo) -> LocalShard:
    try:
        return hold_shard(storage, shard)
    finally:
        if (waiting := fetcher()) is not None:
            waiting.thread_is_free()


class _HeldBlock(dict[str, np.ndarray | Variable]):
    """Column views with the hold on their shard, which lives as long as they."""

    def __init__(self, held: LocalShard) -> None:
        super().__init__()
        self.held = held
