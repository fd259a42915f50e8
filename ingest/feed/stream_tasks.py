"""How are the rows of a stream prepared (`cache: none`)? In Ray tasks, ahead of need, each row once for all ranks.

One task prepares one unit. In one lane, tasks run ahead of the reader until the tables that wait take `AHEAD_SHARE` of the
object store. Each of them keeps its CPUs while it waits for its reader, so a stream runs at most `tasks` of them: otherwise the
tasks of one stream could hold all CPUs while the ranks wait for another one (`streams_cpus`).

With several ranks an actor beside the driver, `SharedStreams`, reads the tasks' results and hands each table to every rank; the
tables themselves go from the node that made them to the nodes of the ranks. If a preparing node dies, Ray runs its tasks again:
tables that ranks have taken stay, those that waited there are prepared again. If a rank dies, all ranks begin again at the
checkpoint, with a new stream from there on.

Plain tasks, not Ray Data: that begins an epoch two seconds later and cancels tasks at the end, which can abort the reading
process (Ray 2.60; see `penstock.ingest.ray_tasks`).
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.ingest.phases import phase
from penstock.ingest.prepare import ANYWHERE, ClusterNode, PrepareSpec
from penstock.ingest.ray_tasks import raising_the_original, ray_streams, ray_task, refuse_nowhere

__all__ = ["AHEAD_SHARE", "STREAM_CPUS", "StreamTables", "UnitStarter", "share_streams", "stream_tasks", "streams_cpus"]

STREAM_CPUS = 0.25
"""CPUs that one preparing task of a stream requests: tasks must fit beside workers that hold whole CPUs."""

OPEN_STREAMS = 2
"""The ranks read the validation split while their train stream stays open."""

LEAST_AHEAD = 2
"""Tables that a task makes at least before it waits for its reader; one takes 16 MB, or more if rows are large."""

AHEAD_SHARE = 0.25
"""Share of the cluster's object store that the waiting tables of one stream should take; more if two of a task are larger."""


def streams_cpus(where: PrepareSpec = ANYWHERE) -> float:
    """Return the CPUs that training workers must leave free so that every stream can run one task."""
    return OPEN_STREAMS * (where.cpus or STREAM_CPUS)


def stream_tasks(free_cpus: float, where: PrepareSpec = ANYWHERE, nodes: Sequence[ClusterNode] = ()) -> int:
    """Return how many tasks a stream may run at a time on `free_cpus`: one for each CPU and one ahead, if all streams' fit."""
    fit = min(int(free_cpus / (where.cpus or STREAM_CPUS)), where.at_once(nodes, STREAM_CPUS))
    return max(1, min(fit // OPEN_STREAMS, int(free_cpus) + 1))


@dataclass(frozen=True)
class StreamTables:
    """Prepared rows of one split, from any unit on, for one rank. Picklable.

    Attributes:
        units: commit units, or source files.
        tables_of: returns a unit's prepared rows as tables of columns as in a shard, the same rows every time.
        rows: of each unit, if known: then reading begins with the unit that holds the wanted row.
        table_bytes: about the size of a table; it decides how many tables a task may make ahead.
        unit_bytes: of each unit, for a stream with lanes; it decides how many units are prepared ahead.
        tasks: most tasks at a time; the order of rows does not depend on it.
        where: what a task takes, and on which nodes they run.
        epochs: read one after the other, if known: the tasks of the next one begin when all tables of one have been read.
        shared: the actor of `share_streams`, and this stream's name; without it this rank prepares all rows for itself.
    """

    units: Sequence[Any]
    tables_of: Callable[[Any], Iterator[pa.Table]]
    rows: Sequence[int] = ()
    table_bytes: int = 16 << 20
    unit_bytes: Sequence[int] = ()
    tasks: int = 1
    where: PrepareSpec = ANYWHERE
    epochs: int = 0
    shared: tuple[Any, str] | None = None
    rank: int = 0
    world_size: int = 1
    _begun: dict[tuple[int, int], Iterator[Any]] = field(default_factory=dict, init=False, compare=False)
    """By epoch and first unit."""

    def __call__(self, epoch: int, row: int) -> tuple[int, Iterator[pa.Table]]:
        """Start to prepare the rows of an epoch from the unit of `row` on, and return the unit's first row and the tables."""
        ends = np.cumsum(np.asarray(self.rows, np.int64))
        first = int(ends.searchsorted(row, side="right")) if len(ends) else 0
        begun = self._begun.pop((epoch, first), None)
        self._begun.clear()
        return int(ends[first - 1]) if first else 0, self._tables(begun or self._begin(epoch, first), epoch)

    def _tables(self, references: Iterator[Any], epoch: int) -> Iterator[pa.Table]:
        for reference in references:
            with phase("tasks"), raising_the_original():
                table: pa.Table = ray.get(reference)
            yield table
        if epoch + 1 < self.epochs:  # while the last rows of this one are used
            self._begun[epoch + 1, 0] = self._begin(epoch + 1, 0)

    def _begin(self, epoch: int, first: int) -> Iterator[Any]:
        if self.shared is None or self.world_size == 1:
            return self.references(first)
        actor, name = self.shared
        # In a list, so that the actor gets the reference: it needs the stream only when it opens it.
        stream = [ray.put(self)]
        take = partial(actor.take.remote, (name, epoch, first), stream, self.rank, self.world_size)
        return _taken(take, take(0))

    def references(self, first: int) -> Iterator[Any]:
        """Start tasks for the units from `first` on, and return an iterator over references to their tables."""
        room = AHEAD_SHARE * float(ray.cluster_resources().get("object_store_memory", 0.0)) / self.tasks
        ahead = max(LEAST_AHEAD, int(room / self.table_bytes))
        how: dict[str, Any] = {"where": self.where, "cpus": STREAM_CPUS, "at_once": self.tasks, "ahead": ahead}
        streams = ray_streams(self.tables_of, self.units[first:], **how)
        return itertools.chain(next(streams, iter(())), itertools.chain.from_iterable(streams))


def _taken(take: Callable[[int], Any], following: Any) -> Iterator[Any]:
    """Yield references that the actor gives; each is asked for while the table before it is used."""
    for index in itertools.count(1):
        with phase("tasks"), raising_the_original():
            found = ray.get(following)
        if not found:
            return
        following = take(index)
        yield found[0]


def share_streams(ranks: int) -> Any:
    """Start the actor that hands tables to `ranks` ranks, on this process's node. It lives as long as this process."""
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": node}
    # A rank waits in a thread of the actor for each of its streams.
    return ray.remote(SharedStreams).options(max_concurrency=2 * OPEN_STREAMS * ranks, **options).remote()


class SharedStreams:
    """Reads each stream once and hands every table to every rank. An actor; its methods run in threads."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, int, int], _OneStream] = {}
        self._units: dict[tuple[str, int, int, int], tuple[list[Any], set[int]]] = {}
        self._starters: dict[str, UnitStarter] = {}
        self._lock = threading.Lock()

    def take(self, key: tuple[str, int, int], stream: Sequence[Any], rank: int, ranks: int, index: int) -> list[Any]:
        """Return the reference to table `index` of a stream, in a list that is empty at the stream's end.

        A rank that asks for a table again, or for the first one of a failed stream, because all ranks were started again, gets
        a new stream.

        Args:
            key: name, epoch and first unit.
            stream: the reference to its `StreamTables`.
        """
        while True:
            with self._lock:
                found = self._streams.get(key)
                # A rank that begins after a failure gets a new stream, also where it had not asked the old one.
                if found is None or found.has_given(index, rank) or (index == 0 and found.has_failed):
                    tables: StreamTables = ray.get(stream[0])
                    for other in [other for other in self._streams if other[0] == key[0]]:
                        # A rank may still read the end of the epoch before. Tasks of another stream would keep their CPUs.
                        if other == key or other[1] < key[1] - 1 or not self._streams[other].is_read_to_end:
                            del self._streams[other]
                    self._streams[key] = found = _OneStream(tables.references(key[2]))
            if (reference := found.take(index, rank, ranks)) is not None:
                return reference

    def unit(self, key: tuple[str, int, int, int], readers: int, rank: int, stream: Sequence[Any], at_once: int) -> list[Any]:
        """Return the reference to the tables of a unit that several ranks read, in a list; the first of them starts the task.

        Args:
            key: name, epoch, first position and number of the unit.
            readers: ranks that ask for it; then it is forgotten here, and lives as long as they keep it.
            stream: the reference to its `StreamTables`.
            at_once: most tasks that this process has started for the stream.
        """
        name, epoch, start, unit = key
        with self._lock:
            for other in [other for other in self._units if other[0] == name]:
                # A rank may read the end of the epoch before, or begin the next one. The rest is of ranks started again.
                if abs(other[1] - epoch) > 1 or (other[1] == epoch and other[2] != start):
                    del self._units[other]
            if name not in self._starters:
                tables: StreamTables = ray.get(stream[0])
                self._starters[name] = UnitStarter(tables, at_once)
            if key not in self._units or _has_failed(self._units[key][0][1]):  # ranks started again get no old error
                self._units[key] = self._starters[name].start(unit), set()
            (found, _end), asked = self._units[key]
            asked.add(rank)
            if len(asked) >= readers:
                del self._units[key]
            return [found]


class UnitStarter:
    """Starts tasks that each prepare one unit of a stream, whole, and end; so many at once."""

    def __init__(self, tables: StreamTables, at_once: int) -> None:
        refuse_nowhere(tables.where, STREAM_CPUS)
        self._tables, self._fn = tables, ray.put(tables.tables_of)
        # The ends of the tasks started last: the next one waits for the first of them.
        self._ends = deque[Any](maxlen=at_once)

    def start(self, unit: int) -> list[Any]:
        """Start to prepare a unit, and return references to the list of its tables, and to the task's end."""
        # A finished end is not waited for: a task that waits for a failed one fails with its error.
        ends = [self._ends[0]] if len(self._ends) == self._ends.maxlen else []
        after = [end for end in ends if not ray.wait([end], timeout=0)[0]]
        started = ray_task(self._fn, self._tables.units[unit], *after, where=self._tables.where, cpus=STREAM_CPUS)
        self._ends.append(started[1])
        return started


def _has_failed(end: Any) -> bool:
    try:
        ray.get(end, timeout=0)
    except GetTimeoutError:
        return False
    except RayError:
        return True
    return False


class _OneStream:
    """References to the tables of a stream, each kept until all ranks have asked for a later one.

    After a restart of the actor ranks go on where they were: the tables before that are prepared again, and not kept.
    """

    def __init__(self, references: Iterator[Any]) -> None:
        self._references, self._first, self._next = references, 0, 0
        self._tables: dict[int, list[Any]] = {}
        self._asked: dict[int, int] = {}
        self._lock = threading.Lock()
        self.is_read_to_end = False

    def has_given(self, index: int, rank: int) -> bool:
        return index < self._first or index <= self._asked.get(rank, -1)

    @property
    def has_failed(self) -> bool:
        return any(_has_failed(each) for table in list(self._tables.values()) for each in table)

    def take(self, index: int, rank: int, ranks: int) -> list[Any] | None:
        """Return None for a table that is not kept, as a late call of the rank's process before asked for another one."""
        self._asked[rank] = index  # before the lock, so that the rank that prepares on knows of it
        with self._lock:
            while self._next <= index:
                self._tables[self._next] = list(itertools.islice(self._references, 1))
                self.is_read_to_end = not self._tables[self._next]
                self._next += 1
                self._forget(ranks)
            self._forget(ranks)
            return self._tables.get(index)

    def _forget(self, ranks: int) -> None:
        while len(self._asked) >= ranks and self._first < min(self._next, *self._asked.values()):
            del self._tables[self._first]
            self._first += 1
