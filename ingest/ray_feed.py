"""How does a training worker read rows that are not cached on disk: from Ray's object store, or prepared anew each epoch?

`MemoryFeed` (`cache: memory`) is the cached feed over blocks in the object store: the same order, the same exact resume. The
blocks live as long as the Ray cluster and the process that put them there; after a driver restart they are prepared again, and
a state continues only if the content is the same.

`StreamFeed` (`cache: none`) runs a Ray Data pipeline once per epoch and rank. What it promises, and what not:
- Every row once per epoch over all ranks, in one order for every world size, if preparing is deterministic. Ray Data keeps the
  order only with `preserve_order`, which `streamed` sets.
- Each rank runs the whole pipeline and keeps its share, so W workers prepare every row W times. Nothing couples the ranks: none
  can hold up another, and no rows are dropped to make shares equal, as Ray Data's own `streaming_split` does.
- Shuffling reaches as far as `shuffle.window_rows` rows, which each rank holds in memory; no order of the whole split.
- A resume prepares the epoch's rows from the start again and skips those already consumed.
- Ray tasks need CPUs that the training workers do not hold, or the first batch never comes (Ray Data gives up only after 30
  minutes). A stream runs at most `tasks` of them at a time, because a task that waits for its reader keeps its CPUs: without a
  bound one rank's tasks can hold all CPUs while that rank waits for another. `streams_cpus` is what must be left free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import ray
import ray.data
import torch
from numpy.typing import NDArray

from ingest.cursor import Batch, FeedCursor, FeedShare, LastBatch, share
from ingest.dataset import ColumnInfo, FeedSchema, Split
from ingest.feed import CachedFeed, select_columns
from ingest.gather import Rows, empty_tensors
from ingest.order import Order
from ingest.parallel import quiet_ray_data, raising_the_original
from ingest.splitmix import hash_words
from penstock.errors import DataError, SpecError

__all__ = [
    "STREAM_CPUS",
    "MemoryDataset",
    "MemoryFeed",
    "StreamFeed",
    "stream_tasks",
    "streamed",
    "streams_cpus",
]

STREAM_CPUS = 0.25
"""CPUs one preparing task of a stream asks for: tasks must fit beside workers that hold whole CPUs."""

STREAMS_PER_RANK = 2
"""A rank reads the validation split while its place in the train split stays open."""

T = TypeVar("T")
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class MemoryDataset:
    """One split's prepared rows in Ray's object store, to be sent to workers; the process that made it must live on."""

    schema: FeedSchema
    split: Split
    blocks: tuple[Any, ...]
    """Object references; each is a dict of column name to array [rows, *shape]."""
    block_rows: tuple[int, ...]
    content: str
    """Digest of the values, block by block; the same rows in the same blocks give the same."""

    @property
    def num_rows(self) -> int:
        """Rows of the split."""
        return sum(self.block_rows)


class MemoryFeed(CachedFeed):
    """Reads a `MemoryDataset`. Blocks are mapped from the node's object store without a copy; batches are fresh tensors."""

    def __init__(
        self,
        dataset: MemoryDataset,
        *,
        batch_rows: int,
        order: Order,
        rank: int = 0,
        world_size: int = 1,
        columns: Sequence[str] | None = None,
        prefetch: int = 2,
        last: LastBatch = "keep",
    ) -> None:
        schema = select_columns(dataset.schema, columns)
        rows = Rows(schema.columns, dataset.block_rows, lambda index: ray.get(dataset.blocks[index]))
        part = FeedShare(batch_rows, rank, world_size, prefetch, last)
        super().__init__(schema, dataset.split, dataset.content, rows, order, part)


def streamed(
    items: Sequence[T], tables_of: Callable[[T], Iterator[pa.Table]], num_cpus: float = STREAM_CPUS, tasks: int = 1
) -> Callable[[], ray.data.Dataset]:
    """Describe a Ray Data pipeline that prepares `items` (source files, or commit units) in order, one task each.

    Args:
        tables_of: gives an item's prepared rows as tables of fixed-shape columns; must give equal rows every time.
        num_cpus: CPUs one task asks for.
        tasks: how many may run at a time; the order of rows does not depend on it.

    Returns:
        A function that makes the dataset anew, to be called once per epoch in the process that reads it. It pickles.
    """
    held = list(items)

    def prepare(batch: Mapping[str, Any]) -> Iterator[pa.Table]:
        for item in batch["item"]:
            yield from tables_of(held[int(item)])

    def make() -> ray.data.Dataset:
        with quiet_ray_data(preserve_order=True):
            numbers = ray.data.from_items([{"item": i} for i in range(len(held))], override_num_blocks=max(1, len(held)))
            return numbers.map_batches(prepare, batch_size=1, num_cpus=num_cpus, concurrency=tasks)

    return make


def streams_cpus(ranks: int) -> float:
    """CPUs that must be left free of training workers so that every stream of `ranks` ranks can run one task."""
    return ranks * STREAMS_PER_RANK * STREAM_CPUS


def stream_tasks(ranks: int, free_cpus: float) -> int:
    """How many tasks each stream of `ranks` ranks may run at a time, one CPU's work each, in `free_cpus`; at least 1."""
    return max(1, int(free_cpus / (ranks * STREAMS_PER_RANK)))


class _Window(NamedTuple):
    """Consecutive rows of the stream, and the order in which they are read."""

    first: int
    arrays: Arrays
    order: NDArray[np.int64]


class StreamFeed(FeedCursor):
    """Reads a Ray Data pipeline that runs anew every epoch. See the module's docstring for its promises and their limits.

    Args:
        make_dataset: makes the pipeline (`streamed`, or any that keeps its order); the same rows in the same order each time.
        order: mode `none`, or `windowed` over `window_rows` consecutive rows of the stream; `rows` is the split's row count.
        content: digest of what the rows depend on, for example the key of the preprocess stage.
        prefetch: batches made ahead in a thread.

    Raises:
        SpecError: an order of mode `global`.
    """

    def __init__(
        self,
        make_dataset: Callable[[], ray.data.Dataset],
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
        self._make_dataset = make_dataset

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch from position `start` on; the rows before are prepared and skipped.

        Raises:
            DataError: the pipeline gives another number of rows than the order is made for.
        """
        self._check_start(epoch, start)
        if start < self.num_rows:
            yield from self._handed_over(epoch, self._batches(epoch, start))

    def _batches(self, epoch: int, start: int) -> Iterator[list[Batch]]:
        """Cut the windows into batches; a batch may take rows of several windows."""
        position, pieces = start, list[tuple[NDArray[np.int64], Arrays]]()
        for window in self._windows(epoch, start):
            end = window.first + len(window.order)
            while position < self.num_rows:
                rows = min(self.part.batch_rows, self.num_rows - position)
                low, high = share(rows, self.part.rank, self.part.world_size)
                taken = window.order[max(position + low - window.first, 0) : max(min(position + high, end) - window.first, 0)]
                if len(taken):
                    pieces.append((window.first + taken, {name: a.take(taken, axis=0) for name, a in window.arrays.items()}))
                if position + rows > end:
                    break
                yield [self._batch(pieces, rows, position + low, position + rows)]
                position, pieces = position + rows, []

    def _batch(self, pieces: list[tuple[NDArray[np.int64], Arrays]], global_rows: int, first: int, position: int) -> Batch:
        if not pieces:
            return Batch(empty_tensors(self.schema.columns, 0), np.empty(0, np.int64), 0, global_rows, first, position)
        ids = np.concatenate([piece_ids for piece_ids, _ in pieces])
        names = [column.name for column in self.schema.columns]
        tensors = {name: torch.from_numpy(np.concatenate([arrays[name] for _, arrays in pieces])) for name in names}
        return Batch(tensors, ids, len(ids), global_rows, first, position)

    def _windows(self, epoch: int, start: int) -> Iterator[_Window]:
        """Windows that reach beyond `start`. Their bounds are counted from the epoch's first row, so a resume sees the same."""
        first = 0
        window_rows = self.order.window_rows if self.order.mode == "windowed" else self.part.batch_rows
        for arrays, rows in _regrouped(self._arrays(), window_rows):
            if first + rows > self.num_rows:
                raise self._wrong_rows(f"more than {self.num_rows}")
            if first + rows > start:
                yield _Window(first, arrays, self._order_within(epoch, first // window_rows, rows))
            first += rows
        if first < self.num_rows:
            raise self._wrong_rows(f"only {first}")

    def _order_within(self, epoch: int, window: int, rows: int) -> NDArray[np.int64]:
        if self.order.mode == "none":
            return np.arange(rows, dtype=np.int64)
        # The window's number takes part in the seed, so that every window of an epoch has an order of its own.
        return Order(mode="global", seed=hash_words(self.order.seed, window), rows=rows).ids(epoch, 0, rows)

    def _arrays(self) -> Iterator[Arrays]:
        with raising_the_original():
            for table in self._make_dataset().iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
                yield table_columns(table, self.schema.columns)

    def _wrong_rows(self, found: str) -> DataError:
        return DataError(
            f"the streamed {self._state.split} split gives {found} rows where {self.num_rows} were counted",
            next_step="prepare the rows deterministically, or set `materialize.cache` to disk",
        )


def table_columns(table: pa.Table, columns: Sequence[ColumnInfo]) -> Arrays:
    """Arrays [rows, *shape] of a prepared table's columns, each contiguous and in its column's dtype.

    Raises:
        DataError: a column is missing or has another shape or dtype.
    """
    arrays: Arrays = {}
    for column in columns:
        if column.name not in table.column_names:
            raise DataError(f"prepared rows lack column {column.name!r}; they have {table.column_names}")
        chunks = [_chunk_array(chunk) for chunk in table.column(column.name).chunks]
        values = np.concatenate(chunks) if chunks else np.empty((0, *column.shape), column.dtype)
        if values.dtype == np.bool_:
            values = values.astype(np.uint8)
        if values.shape[1:] != column.shape or values.dtype != np.dtype(column.dtype):
            raise DataError(
                f"column {column.name!r} of prepared rows is {values.dtype}{list(values.shape[1:])} per row, "
                f"the schema says {column.dtype}{list(column.shape)}"
            )
        arrays[column.name] = values
    return arrays


def _chunk_array(chunk: pa.Array) -> np.ndarray:
    if hasattr(chunk, "to_numpy_ndarray"):
        return chunk.to_numpy_ndarray()
    return chunk.to_numpy(zero_copy_only=False)


def _regrouped(parts: Iterable[Arrays], rows: int) -> Iterator[tuple[Arrays, int]]:
    """Cut a stream of column arrays into pieces of exactly `rows` rows (the last may be shorter), whatever the parts' sizes."""
    held: list[Arrays] = []
    count = 0
    for part in parts:
        size = len(next(iter(part.values())))
        taken = 0
        while taken < size:
            step = min(size - taken, rows - count)
            held.append({name: values[taken : taken + step] for name, values in part.items()})
            taken, count = taken + step, count + step
            if count == rows:
                yield _joined(held), count
                held, count = [], 0
    if count:
        yield _joined(held), count


def _joined(parts: Sequence[Arrays]) -> Arrays:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
