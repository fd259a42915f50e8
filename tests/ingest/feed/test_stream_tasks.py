"""A stream is prepared once, whatever reads it: its tasks are counted by the files that they touch."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray

from penstock.ingest.feed.batch import Batch
from penstock.ingest.feed.stream import StreamFeed
from penstock.ingest.feed.stream_tasks import StreamTables, share_streams
from penstock.ingest.shuffle.order import Order
from tests.conformance.feed_cases import BATCH_ROWS, ROWS, SCHEMA, check_values, order_of, table

pytestmark = pytest.mark.usefixtures("ray_cluster")

UNITS = [(begin, min(begin + 100, ROWS)) for begin in range(0, ROWS, 100)]


def counted(folder: Path, cost_s: float = 0.0) -> Callable[[tuple[int, int]], Iterator[pa.Table]]:
    """Prepare a unit in tables of 25 rows, and leave a line for each."""

    def prepare(unit: tuple[int, int]) -> Iterator[pa.Table]:
        for begin in range(*unit, 25):
            time.sleep(cost_s)  # the cost of preparing
            ids = np.arange(begin, min(begin + 25, unit[1]))
            with open(folder / f"prepared-{os.getpid()}", "a") as file:
                file.write(f"{begin} {len(ids)}\n")
            yield table(ids)

    return prepare


def prepared(folder: Path, *, forget: bool = True) -> Counter[int]:
    """How many rows were prepared from each row on; forgotten then, which needs that no task is at work."""
    found: Counter[int] = Counter()
    for path in folder.glob("prepared-*"):
        for line in path.read_text().splitlines():
            begin, rows = map(int, line.split())
            found[begin] += rows
        if forget:
            path.unlink()
    return found


def opened(prepare: Any, actor: Any, ranks: int, order: Order | None = None, **options: Any) -> list[StreamFeed]:
    rows = [end - begin for begin, end in UNITS]
    place: dict[str, Any] = {"shared": None if actor is None else (actor, "train"), "world_size": ranks}
    more = {"table_bytes": 1 << 20, "tasks": 2} | options
    return [
        StreamFeed(
            StreamTables(UNITS, prepare, rows, rank=rank, **place, **more), SCHEMA, "train", content="c",
            batch_rows=BATCH_ROWS, order=order or order_of("windowed", 3), rank=rank, world_size=ranks, prefetch=1,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def together(feeds: Sequence[StreamFeed], epoch: int, start: int = 0) -> list[list[int]]:
    """The rows of each step, read by all ranks side by side."""
    steps = []
    for parts in zip(*(feed.batches(epoch, start) for feed in feeds), strict=True):
        for part in parts:
            check_values(part)
        steps.append([row for part in parts for row in part.row_ids.tolist()])
    return steps


def test_rows_are_prepared_once_for_any_number_of_ranks(tmp_path: Path) -> None:
    actor, prepare = share_streams(7), counted(tmp_path)
    (alone,) = opened(prepare, None, 1)
    expected = [together([alone], epoch) for epoch in (0, 1)]
    prepared(tmp_path)
    for ranks in (1, 2, 3, 4, 7):
        feeds = opened(prepare, actor, ranks)
        for epoch in (0, 1):
            assert together(feeds, epoch) == expected[epoch]
            found = prepared(tmp_path)
            assert found.total() == ROWS and max(found.values()) <= 25, "each row once"


def test_resume_prepares_no_unit_before_its_window(tmp_path: Path) -> None:
    actor, prepare = share_streams(2), counted(tmp_path)
    feeds = opened(prepare, actor, 2)
    straight = together(feeds, 0)
    prepared(tmp_path)
    start = 10 * BATCH_ROWS  # 640: in the window of 150 rows that begins at row 600
    assert together(opened(prepare, actor, 2), 0, start) == straight[10:]
    found = prepared(tmp_path)
    assert min(found) == 600 and found.total() == ROWS - 600


def test_ranks_started_again_read_the_same_rows(tmp_path: Path) -> None:
    actor, prepare = share_streams(2), counted(tmp_path)
    straight = together(opened(prepare, None, 1), 0)
    feeds = opened(prepare, actor, 2)
    first, second = (feed.batches(0) for feed in feeds)
    list(islice(first, 3)), list(islice(second, 1))  # one rank is behind when both end
    assert together(opened(prepare, actor, 2), 0) == straight


def test_rank_started_again_gets_no_error_of_before(tmp_path: Path) -> None:
    prepare, actor, away = counted(tmp_path), share_streams(2), tmp_path / "away"

    def may_fail(unit: tuple[int, int]) -> Iterator[pa.Table]:
        if away.exists():
            raise OSError("the store is away")
        yield from prepare(unit)

    straight = together(opened(prepare, None, 1), 0)
    away.touch()
    with pytest.raises(OSError, match="the store is away"):
        next(opened(may_fail, actor, 2)[0].batches(0))
    away.unlink()
    second, first = ([batch.row_ids.tolist() for batch in feed.batches(0)] for feed in reversed(opened(may_fail, actor, 2)))
    assert [one + other for one, other in zip(first, second, strict=True)] == straight


def test_killed_task_costs_only_its_unit(tmp_path: Path) -> None:
    prepare, actor = counted(tmp_path), share_streams(2)

    def dies_once(unit: tuple[int, int]) -> Iterator[pa.Table]:
        for part in prepare(unit):
            if unit[0] == 500 and not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield part

    straight = together(opened(prepare, None, 1), 0)
    prepared(tmp_path)
    assert together(opened(dies_once, actor, 2), 0) == straight
    again = {row for row, rows in prepared(tmp_path).items() if rows > 25}
    assert (tmp_path / "died").exists() and again <= set(range(500, 600)) | {1000}


def test_tables_of_a_restarted_actor_are_not_kept(tmp_path: Path) -> None:
    actor, prepare = share_streams(2), counted(tmp_path)
    straight = together(opened(prepare, None, 1), 0)
    steps = []
    for parts in zip(*(feed.batches(0) for feed in opened(prepare, actor, 2)), strict=True):
        steps.append([row for part in parts for row in part.row_ids.tolist()])
        if len(steps) == 8:  # of 16
            ray.kill(actor, no_restart=False)
    assert steps == straight

    def kept(self: Any) -> list[int]:
        return [index for stream in self._streams.values() for index in stream._tables]

    assert len(ray.get(actor.__ray_call__.remote(kept))) <= 2, "of 41"


def idle_share(feed: StreamFeed, step_s: float) -> float:
    """The share of the time after the first batch that a trainer, whose steps take so long, waits for rows."""
    waits: list[float] = []
    batches = feed.batches(0)
    began_s = time.perf_counter()
    while next(batches, None) is not None:
        waits.append(time.perf_counter() - began_s)
        time.sleep(step_s)  # the step
        began_s = time.perf_counter()
    return sum(waits[1:]) / (sum(waits[1:]) + step_s * len(waits))


def test_units_are_prepared_side_by_side_during_a_step(tmp_path: Path) -> None:
    prepare = counted(tmp_path)

    def beside_the_next(unit: tuple[int, int]) -> Iterator[pa.Table]:
        (tmp_path / f"begun-{unit[0]}").touch()
        wait_for(lambda: unit == UNITS[-1] or (tmp_path / f"begun-{unit[1]}").exists())
        yield from prepare(unit)

    (feed,) = opened(beside_the_next, None, 1, Order(mode="none", rows=ROWS))
    for batch in feed.batches(0):  # in the step, which asks for nothing
        wait_for(lambda: prepared(tmp_path, forget=False).total() >= min(ROWS, batch.position + BATCH_ROWS))  # noqa: B023


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.drill
def test_workers_do_not_wait_if_tasks_together_are_fast_enough(tmp_path: Path) -> None:
    # Two tasks need 400 ms for 100 rows, which are trained in 1,250 ms, so a busy machine may be three times slower. One task
    # needs 800 ms; steps of a quarter leave it 310 ms.
    cost_s, step_s = 0.2, 0.8
    order = Order(mode="none", rows=ROWS)
    fast, slow = (opened(counted(tmp_path, cost_s), None, 1, order, tasks=tasks)[0] for tasks in (2, 1))
    # The first time also starts processes.
    assert any(idle_share(fast, step_s) < 0.05 for _ in range(3))
    assert idle_share(slow, step_s / 4) > 0.3


def test_task_ahead_of_need_waits_for_its_reader(tmp_path: Path) -> None:
    actor = share_streams(2)
    feeds = opened(counted(tmp_path), actor, 2, table_bytes=1 << 40)
    readers = [feed.batches(0) for feed in feeds]
    batches: list[Batch] = [next(reader) for reader in readers]
    assert sum(batch.rows for batch in batches) == BATCH_ROWS
    for _ in range(20):  # nothing more comes, however long nobody reads
        time.sleep(0.05)  # time in which tasks could run ahead
    # Two windows of 150 rows, a table on its way, and of each of two tasks two tables and the one in work.
    assert prepared(tmp_path).total() <= 2 * 150 + 25 * (2 + 2 * 3) + 100
    for reader in readers:
        reader.close()  # type: ignore[attr-defined]
