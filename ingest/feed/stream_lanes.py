"""How does a training worker read the lanes of a stream (`cache: none`)? It prepares the units of its own lanes, ahead of need.

The units of a stream (files, or pieces of large ones) are dealt to lanes like shards (ingest/shuffle/lanes.py). A task prepares
one unit, whole, and ends, so that no task waits for a reader. A rank starts tasks in the order in which it will use their
units, until those that wait take its part of `AHEAD_SHARE` of the object store. It holds a unit from its first use to the end
of the window that has the unit's last row.

- Ranks that read different lanes prepare different units. A unit that is cut between lanes of two ranks is prepared once, too:
  the actor `SharedStreams` hands it to both.
- Of more ranks than lanes, several read a lane. Then the actor hands out all units, and a rank fetches those that it reads.
- A resume prepares the units that have rows left at its position.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from penstock.errors import DataError
from penstock.ingest.columns.arrays import Block, column_view, contiguous
from penstock.ingest.feed.batch import Batch, FeedShare, own_positions
from penstock.ingest.feed.cached import IDS_AT_ONCE, batches_at_once, gathered, select_columns
from penstock.ingest.feed.cursor import Feed
from penstock.ingest.feed.gather import RowGather, fixed_bytes
from penstock.ingest.feed.stream import select_prepared
from penstock.ingest.feed.stream_tasks import AHEAD_SHARE, StreamTables, UnitStarter
from penstock.ingest.phases import phase
from penstock.ingest.ray_tasks import raising_the_original
from penstock.ingest.schema import FeedSchema, Split
from penstock.ingest.shuffle.lanes import PartOf
from penstock.ingest.shuffle.order import Order

__all__ = ["LaneFeed"]


class LaneFeed(Feed):
    """Reads the lanes of a stream. Every row comes once an epoch over all ranks, in one order for every world size.

    Args:
        tables: the units, and this rank's place.
        order: of several lanes of these units.
        content: digest of everything that the rows depend on.
        prefetch: groups of batches made ahead in a thread; 0 uses none.
    """

    def __init__(
        self,
        tables: StreamTables,
        schema: FeedSchema,
        split: Split,
        *,
        content: str,
        batch_rows: int,
        order: Order,
        columns: Sequence[str] | None = None,
        prefetch: int = 2,
    ) -> None:
        part = FeedShare(batch_rows, tables.rank, tables.world_size, prefetch, lanes=order.lanes)
        super().__init__(select_columns(schema, columns), split, content, order.of_shards(tables.rows), part)
        self._tables = tables
        lists = any(column.varies for column in self.schema.columns)
        self._group_batches = 1 if lists else batches_at_once(part, fixed_bytes(self.schema.columns))
        self._begun: dict[tuple[int, int], _UnitsAhead] = {}

    def _groups(self, epoch: int, start: int) -> Generator[list[Batch]]:
        """Gather the batches that end in one window together: the next window may take long."""
        ahead = self._begun.pop((epoch, start), None) or _UnitsAhead(self._tables, self.order, self.part, epoch, start)
        self._begun.clear()
        rows = RowGather(self.schema.columns, self._tables.rows, lambda unit: self._block(unit, ahead.take(unit)))
        firsts = range(start, self.num_rows, self.part.batch_rows)
        cuts = ((first, min(first + self.part.batch_rows, self.num_rows)) for first in firsts)
        for _, ending in itertools.groupby(cuts, lambda cut: self.order.lane_rows.window_at(cut[1] - 1)):
            while group := list(itertools.islice(ending, self._group_batches)):
                own = own_positions(self.part, group)
                batches = gathered(rows, group, own, self.order.ids_at(epoch, np.concatenate(own)))
                rows.close(ahead.used(group[-1][1]))
                if ahead.is_taken and epoch + 1 < self._tables.epochs and not self._begun:  # while the last rows are used
                    self._begun[epoch + 1, 0] = _UnitsAhead(self._tables, self.order, self.part, epoch + 1, 0)
                yield batches

    def _block(self, unit: int, tables: Sequence[pa.Table]) -> Block:
        found, counted = sum(table.num_rows for table in tables), self._tables.rows[unit]
        if found != counted:
            raise DataError(
                f"a unit of the streamed {self._state.split} split has {found} rows, and {counted} were counted before",
                next_step="prepare the rows deterministically, or set `materialize.cache` to disk",
            )
        table = pa.concat_tables([select_prepared(each, self.schema.columns) for each in tables])
        views = {name: column_view(contiguous(table.column(name))) for name in table.column_names}
        # A copy leaves the object store to the units that wait.
        return {
            name: view.copy() if isinstance(view, np.ndarray) and len(tables) == 1 else view for name, view in views.items()
        }


class _UnitsAhead:
    """The units of one rank, from a position of an epoch on: tasks prepare them in the order of their first use."""

    def __init__(self, tables: StreamTables, order: Order, part: FeedShare, epoch: int, start: int) -> None:
        self._tables, self._place = tables, (epoch, start)
        ranks, units = tables.world_size, len(tables.rows)
        # A slice of a short step may reach into any lane, so more ranks than lanes follow all of them.
        all_lanes = ranks > order.lanes
        shard, lane, ends = order.lane_rows.part_uses(epoch)
        shard, lane, ends = (each[ends > start] for each in (shard, lane, ends))
        rank_of = np.repeat(np.arange(ranks), np.diff(np.arange(ranks + 1) * order.lanes // ranks))[lane]
        pairs = np.unique(shard * ranks + rank_of) // ranks
        self._readers = np.full(units, ranks) if all_lanes else np.bincount(pairs, minlength=units)
        self._used_at = np.zeros(units, np.int64)
        own = all_lanes | (rank_of == tables.rank)
        np.maximum.at(self._used_at, shard[own], ends[own])
        share = 1 if all_lanes else ranks
        self._room = AHEAD_SHARE * float(ray.cluster_resources().get("object_store_memory", 0.0)) / share
        self._bytes = np.asarray(tables.unit_bytes if len(tables.unit_bytes) else [tables.table_bytes] * units)
        # One part of the tasks is of units that ranks share.
        self._at_once = max(1, tables.tasks // (1 if share == 1 else ranks + 1))
        self._shared_at_once = self._at_once if all_lanes or tables.where.concurrency is not None else ranks
        self._starter = UnitStarter(tables, self._at_once)
        self._stream = [ray.put(tables)] if tables.shared is not None else []
        self._needed = _first_uses(order, part, PartOf(np.cumsum(tables.rows)), epoch, start, all_lanes=all_lanes)
        self._waiting: dict[int, Any] = {}
        self._waiting_bytes = 0
        self._started: set[int] = set()
        self._all_started = False
        self._fill()

    @property
    def is_taken(self) -> bool:
        """Whether no unit waits, nor will."""
        return self._all_started and not self._waiting

    def take(self, unit: int) -> list[pa.Table]:
        """Return the prepared tables of a unit, once."""
        with phase("tasks"), raising_the_original():
            while unit not in self._waiting:
                self._start(next(self._needed))
            found = self._no_longer_waits(unit)
            self._fill()
            tables: list[pa.Table] = ray.get(found)
        return tables

    def used(self, position: int) -> list[int]:
        """Return the units that are not needed from a position on, once."""
        done = [unit for unit in self._started if self._used_at[unit] <= position]
        self._started.difference_update(done)
        for unit in done:
            self._no_longer_waits(unit)
        self._fill()
        return done

    def _no_longer_waits(self, unit: int) -> Any:
        self._waiting_bytes -= int(self._bytes[unit]) if unit in self._waiting else 0
        return self._waiting.pop(unit, None)

    def _fill(self) -> None:
        while len(self._waiting) < self._at_once or self._waiting_bytes < self._room:
            if (unit := next(self._needed, None)) is None:
                self._all_started = True
                return
            self._start(unit)

    def _start(self, unit: int) -> None:
        readers, shared = int(self._readers[unit]), self._tables.shared
        if readers > 1 and shared is not None:
            key = (shared[1], *self._place, unit)
            started = shared[0].unit.remote(key, readers, self._tables.rank, self._stream, self._shared_at_once)
            (self._waiting[unit],) = ray.get(started)
        else:
            self._waiting[unit], _end = self._starter.start(unit)
        self._started.add(unit)
        self._waiting_bytes += int(self._bytes[unit])


def _first_uses(order: Order, part: FeedShare, unit_of: PartOf, epoch: int, start: int, *, all_lanes: bool) -> Iterator[int]:
    """Yield the units of this rank's lanes, or of all, in the order of their first use."""
    seen = set[int]()
    for first in range(start, order.rows, IDS_AT_ONCE):
        stop = min(first + IDS_AT_ONCE, order.rows)
        positions = np.arange(first, stop) if all_lanes else part.lane_positions(first, stop)
        units, at = np.unique(unit_of(order.ids_at(epoch, positions)), return_index=True)
        for unit in units[np.argsort(at)].tolist():
            if unit not in seen:
                seen.add(unit)
                yield unit
