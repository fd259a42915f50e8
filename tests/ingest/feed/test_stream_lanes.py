"""Each rank prepares the units of its own lanes, each once, for any number of ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray

from penstock.errors import DataError
from penstock.ingest.feed.gather import RowGather
from penstock.ingest.feed.stream_lanes import LaneFeed
from penstock.ingest.feed.stream_tasks import StreamTables, share_streams
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from tests.conformance.feed_cases import BATCH_ROWS, ROWS, SCHEMA, UNIT_ROWS, check_values, table
from tests.ingest.feed import test_stream_tasks
from tests.ingest.feed.test_stream_tasks import counted, prepared, wait_for

pytestmark = pytest.mark.usefixtures("ray_cluster")

UNITS = list(pairwise([0, *accumulate(UNIT_ROWS)]))
LANES, WINDOW = 4, 200
RANKS = (1, 2, 3, 4, 7)


def opened(prepare: Any, actor: Any, ranks: int, units: Sequence[Any] = UNITS, **options: Any) -> list[LaneFeed]:
    spec = ShuffleSpec(mode="windowed", window_rows=WINDOW, lanes=LANES, seed=3)
    unit_rows = [end - begin for begin, end in units]
    order = make_order(spec, ROWS, unit_rows, unit_bytes=unit_rows)
    place: dict[str, Any] = {"shared": None if actor is None else (actor, "train"), "world_size": ranks}
    more = {"tasks": 2, "unit_bytes": unit_rows} | options
    return [
        LaneFeed(
            StreamTables(units, prepare, unit_rows, rank=rank, **place, **more), SCHEMA, "train", content="c",
            batch_rows=BATCH_ROWS, order=order, prefetch=1,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def together(feeds: Sequence[LaneFeed], epoch: int, start: int = 0, count: int | None = None) -> list[list[int]]:
    """The rows of each step, sorted, read by all ranks side by side."""
    steps = []
    for parts in zip(*(islice(feed.batches(epoch, start), count) for feed in feeds), strict=True):
        assert len({(part.position, part.global_rows) for part in parts}) == 1
        for part in parts:
            check_values(part)
        steps.append(sorted(row for part in parts for row in part.row_ids.tolist()))
    return steps


def rows_prepared(folder: Path) -> dict[int, int]:
    """Unit -> how often it was prepared."""
    ends = np.cumsum(UNIT_ROWS)
    found = np.zeros(len(UNITS))
    for begin, rows in prepared(folder).items():
        found[ends.searchsorted(begin, side="right")] += rows
    return {unit: float(rows / of) for unit, (rows, of) in enumerate(zip(found, UNIT_ROWS, strict=True)) if rows}  # type: ignore[misc]


ONCE = dict.fromkeys(range(len(UNITS)), 1)


def test_units_are_prepared_once_for_any_number_of_ranks(tmp_path: Path) -> None:
    actor, prepare = share_streams(7), counted(tmp_path)
    (alone,) = opened(prepare, None, 1)
    whole = [together([alone], epoch) for epoch in (0, 1)]
    assert [sorted(row for step in steps for row in step) for steps in whole] == [[*range(ROWS)]] * 2 and whole[0] != whole[1]
    prepared(tmp_path)
    for ranks in RANKS:
        feeds = opened(prepare, actor, ranks)
        for epoch in (0, 1):
            assert together(feeds, epoch) == whole[epoch], ranks
            assert rows_prepared(tmp_path) == ONCE, ranks
        assert ray.get(actor.__ray_call__.remote(lambda self: len(self._units))) == 0, "all were taken"


def test_each_number_of_ranks_continues_the_one_before(tmp_path: Path) -> None:
    actor, prepare = share_streams(7), counted(tmp_path)
    (alone,) = opened(prepare, None, 1)
    whole = [together([alone], epoch) for epoch in (0, 1)]
    state, seen = alone.state_dict() | {"epoch": 0, "position": 0}, list[list[list[int]]]([[], []])
    for ranks, count in zip((*RANKS, 2), (3, 5, 0, 8, 6, 10), strict=True):
        feeds = opened(prepare, actor, ranks)
        epoch, position = feeds[0].load_state_dict(json.loads(json.dumps(state)))
        epoch, position = (epoch + 1, 0) if position == ROWS else (epoch, position)
        seen[epoch] += together(feeds, epoch, position, count)
        if count:
            states = [feed.state_dict() for feed in feeds]
            assert all(each == states[0] for each in states), "every rank saves the same"
            state = states[-1]
    assert seen == whole


@pytest.mark.parametrize("ranks", [1, 3])
def test_resume_prepares_the_units_with_rows_left(tmp_path: Path, ranks: int) -> None:
    actor, prepare = share_streams(ranks), counted(tmp_path)
    straight = together(opened(prepare, None, 1), 0)
    prepared(tmp_path)
    for step in (8, 8, 15):  # of 16; resumed twice at one place
        assert together(opened(prepare, actor, ranks), 0, step * BATCH_ROWS) == straight[step:]
        left = {row for rows in straight[step:] for row in rows}
        assert rows_prepared(tmp_path) == {unit: 1 for unit, rows in enumerate(UNITS) if left & set(range(*rows))}


def test_rank_receives_its_units_alone_and_holds_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor, prepare = share_streams(4), counted(tmp_path)
    units = [(begin, min(begin + 10, ROWS)) for begin in range(0, ROWS, 10)]
    received, held = list[int](), list[int]()
    block, close = LaneFeed._block, RowGather.close

    def blocks(feed: LaneFeed, unit: int, tables: Sequence[pa.Table]) -> Any:
        received.append(unit)
        return block(feed, unit, tables)

    def closed(rows: RowGather, blocks: Any) -> None:
        held.append(len(rows._opened))
        close(rows, blocks)

    monkeypatch.setattr(LaneFeed, "_block", blocks)
    monkeypatch.setattr(RowGather, "close", closed)
    for feed in opened(prepare, actor, 4, units):
        own = {row for batch in feed.batches(0) for row in batch.row_ids.tolist()}
        assert sorted(received) == [unit for unit, rows in enumerate(units) if own & set(range(*rows))]
        assert len(received) <= len(units) / 4 + 2, "and two that are cut"
        # A batch may reach from one window of 50 rows into the next one, in units that begin before and end after.
        assert max(held) <= 2 * 50 / 10 + 2
        received.clear(), held.clear()
    assert prepared(tmp_path).total() == ROWS


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("open_feeds", "read"),
    [(opened, together), (test_stream_tasks.opened, test_stream_tasks.together)],
    ids=["lanes", "one lane"],
)
def test_next_epoch_is_prepared_while_the_last_rows_are_used(tmp_path: Path, ranks: int, open_feeds: Any, read: Any) -> None:
    feeds = open_feeds(counted(tmp_path), share_streams(ranks), ranks, epochs=2)
    steps = read(feeds, 0)
    wait_for(lambda: prepared(tmp_path, forget=False).total() > ROWS)  # nobody asks for epoch 1 yet
    assert read(feeds, 1) != steps
    assert prepared(tmp_path).total() == 2 * ROWS, "the last epoch begins no other"


def test_ranks_started_again_read_the_same_rows(tmp_path: Path) -> None:
    actor, prepare = share_streams(2), counted(tmp_path)
    straight = together(opened(prepare, None, 1), 0)
    first, second = (feed.batches(0) for feed in opened(prepare, actor, 2))
    list(islice(first, 5)), list(islice(second, 1))  # one rank is behind when both end
    assert together(opened(prepare, actor, 2), 0) == straight
    assert together(opened(prepare, actor, 2), 0, 8 * BATCH_ROWS) == straight[8:]
    assert ray.get(actor.__ray_call__.remote(lambda self: len(self._units))) == 0


def test_killed_task_costs_only_its_unit(tmp_path: Path) -> None:
    prepare, actor = counted(tmp_path), share_streams(2)

    def dies_once(unit: tuple[int, int]) -> Iterator[pa.Table]:
        for part in prepare(unit):
            if unit == UNITS[5] and not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield part

    straight = together(opened(prepare, None, 1), 0)
    prepared(tmp_path)
    assert together(opened(dies_once, actor, 2), 0) == straight
    found = rows_prepared(tmp_path)
    assert (tmp_path / "died").exists() and 1 < found.pop(5) < 2 and set(found.values()) == {1}


@pytest.mark.parametrize("ranks", [2, 7])
def test_failed_unit_is_prepared_again_when_it_can_be(tmp_path: Path, ranks: int) -> None:
    prepare, actor, away = counted(tmp_path), share_streams(ranks), tmp_path / "away"

    def may_fail(unit: tuple[int, int]) -> Iterator[pa.Table]:
        if away.exists():
            raise OSError("the store is away")
        yield from prepare(unit)

    straight = together(opened(prepare, None, 1), 0)
    away.touch()
    with pytest.raises(OSError, match="the store is away"):
        together(opened(may_fail, actor, ranks), 0)
    # The tasks that wait for a failed one fail with it.
    ray.get(actor.__ray_call__.remote(lambda self: [ray.wait([end]) for end in self._starters["train"]._ends]), timeout=60)
    away.unlink()
    assert together(opened(may_fail, actor, ranks), 0) == straight


@pytest.mark.parametrize(("tasks", "room", "most"), [(2, 0, 2), (3, 0, 3), (2, 4, 4)])
def test_units_ahead_of_need_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: int, room: int, most: int
) -> None:
    # Each unit takes `1 / room` of what may wait; without room there is one for each task.
    store = ray.cluster_resources()["object_store_memory"]
    unit_bytes = [int(store / 4 / room) + 1 if room else 1 << 60] * len(UNITS)
    (feed,) = opened(counted(tmp_path), None, 1, tasks=tasks, unit_bytes=unit_bytes)
    taken: list[int] = []
    block = LaneFeed._block
    monkeypatch.setattr(LaneFeed, "_block", lambda feed, unit, tables: taken.append(unit) or block(feed, unit, tables))
    batches = feed.batches(0)
    next(batches)
    for _ in range(20):  # nothing more comes, however long nobody reads
        time.sleep(0.05)  # time in which tasks could run ahead
    started = set(rows_prepared(tmp_path))
    assert set(taken) < started and len(started) <= len(taken) + most
    batches.close()  # type: ignore[attr-defined]


def test_at_most_so_many_tasks_run_at_once(tmp_path: Path) -> None:
    prepare = counted(tmp_path)

    def alone(unit: tuple[int, int]) -> Iterator[pa.Table]:
        (tmp_path / "at-work").touch(exist_ok=False)
        yield from prepare(unit)
        (tmp_path / "at-work").unlink()

    together(opened(alone, None, 1, tasks=1), 0)


def broken(unit: tuple[int, int]) -> Iterator[pa.Table]:
    if unit == UNITS[5]:
        raise DataError("file b.csv, row 3: no number")
    yield table(np.arange(*unit))


def one_less(unit: tuple[int, int]) -> Iterator[pa.Table]:
    yield table(np.arange(unit[0], unit[1] - (unit == UNITS[5])))


@pytest.mark.parametrize(
    ("prepare", "words"), [(broken, "row 3"), (one_less, "a unit of the streamed train split has 100 rows, and 101")]
)
def test_wrong_unit_is_an_error(prepare: Callable[[Any], Iterator[pa.Table]], words: str) -> None:
    with pytest.raises(DataError, match=words):
        together(opened(prepare, None, 1), 0)
