"""One suite for every feed: a reader that stops anywhere and continues gets what an uninterrupted one gets."""

from __future__ import annotations

import functools
import gc
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from torch import Tensor

from penstock.errors import ResumeError, SpecError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.feed.cached import open_cached_feed
from penstock.ingest.feed.cursor import Feed
from penstock.ingest.feed.stream import MemoryFeed, StreamFeed
from penstock.ingest.feed.stream_lanes import LaneFeed
from penstock.ingest.feed.stream_tasks import StreamTables, share_streams
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.materialize.without_disk import MemoryDataset
from penstock.ingest.shuffle.row_generator import RowGenerator
from penstock.ingest.spec import LengthSpec
from penstock.storage import Storage

from .feed_cases import (
    BATCH_ROWS,
    LISTS,
    ROWS,
    SCHEMA,
    UNIT_ROWS,
    Case,
    Opener,
    check_values,
    lists_table,
    put_dataset,
    table,
    write_dataset,
)

KINDS = [
    *(f"disk-{mode}-{shards}" for mode in ("none", "windowed", "global") for shards in (1, 5)),
    "remote-global-5",
    *(f"disk-{mode}-5" for mode in ("global8", "rows8", "shards8")),
    "remote-global8-5",
    "disk-global-5-lists",
    "memory-global",
    "memory-windowed",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("stream-none", "stream-windowed")),
    *(
        pytest.param(kind, marks=pytest.mark.drill)
        for kind in (
            "disk-global8-5-lists",
            "disk-windowed-5-lists-bylength",
            "memory-global-lists",
            "memory-windowed-lists-bylength",
            "stream-windowed-lists",
            "stream-none-lists-bylength",
            "stream-units8-lists",
        )
    ),
]


@pytest.fixture(scope="module")
def memory_dataset(ray_cluster: None) -> Callable[[bool], MemoryDataset]:
    return functools.cache(lambda lists: put_dataset(lists=lists))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int, bool], tuple[Storage, DatasetManifest]]]:
    """Returns the rows in a storage as so many shards; each dataset is written once."""
    folder = tmp_path_factory.mktemp("written")

    @functools.cache
    def write(place: str, shards: int, lists: bool) -> tuple[Storage, DatasetManifest]:
        name = f"{place}-{shards}-{lists}"
        storage = Storage(f"memory://{folder.name}/{name}" if place == "remote" else str(folder / name))
        return storage, write_dataset(storage, folder / "scratch" / name, shards, lists=lists)

    yield write
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{folder.name}"):
        memory.rm(f"/{folder.name}", recursive=True)


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(
        "penstock.ingest.feed.cached.GROUP_BYTES", 3 * BATCH_ROWS * 34
    )  # an epoch takes several groups, of 3 batches and more
    monkeypatch.setattr("penstock.ingest.feed.read_ahead.LOST_S", 0.0)  # gathered ahead from the start
    place, mode, *rest = request.param.split("-")
    lists = "lists" in rest
    # Pools of five batches: the last, shorter batch of an epoch is alone in its pool, and so stays the last.
    by_length = LengthSpec(column="tokens", pool_batches=5) if "bylength" in rest else None
    open_as: Callable[..., Feed]
    if place == "memory":
        open_as = partial(MemoryFeed, request.getfixturevalue("memory_dataset")(lists))
    elif place == "stream":
        request.getfixturevalue("ray_cluster")
        made = lists_table if lists else table
        units = [(0, 400), (400, 401), (401, ROWS)]
        if mode == "units8":
            units = list(pairwise([0, *accumulate(UNIT_ROWS)]))
        schema, share = LISTS if lists else SCHEMA, functools.cache(partial(share_streams, 5))

        def open_as(rank: int = 0, world_size: int = 1, **options: Any) -> Feed:
            tables = StreamTables(
                units, lambda bounds: iter([made(np.arange(*bounds))]), [end - begin for begin, end in units],
                tasks=2, shared=(share(), "train") if world_size > 1 else None, rank=rank, world_size=world_size,
            )  # fmt: skip
            if mode == "units8":
                return LaneFeed(tables, schema, "train", content="c", **options)
            return StreamFeed(tables, schema, "train", content="c", rank=rank, world_size=world_size, **options)

    else:
        monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
        open_as = partial(open_cached_feed, [request.getfixturevalue("written")(place, int(rest[0]), lists)], "train")
    return Case(request.param, Opener(open_as, mode, by_length), shuffles=mode != "none" or by_length is not None)


def ids_of(batches: Iterator[Batch]) -> list[int]:
    out: list[int] = []
    for batch in batches:
        check_values(batch)
        assert batch.rows == len(batch.row_ids)
        out.extend(batch.row_ids.tolist())
    return out


def stored(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as a checkpoint gives it back."""
    return dict(json.loads(json.dumps(state)))


def test_an_epoch_holds_every_row_once_and_can_be_entered_anywhere(case: Case) -> None:
    feed = case.open()
    assert feed.num_rows == ROWS
    whole = list(feed.batches(0))
    ids = ids_of(iter(whole))
    assert sorted(ids) == list(range(ROWS))
    assert [batch.global_rows for batch in whole] == [BATCH_ROWS] * (ROWS // BATCH_ROWS) + [ROWS % BATCH_ROWS]
    assert [batch.position for batch in whole] == [*range(BATCH_ROWS, ROWS, BATCH_ROWS), ROWS]
    assert [batch.first_row for batch in whole] == [*range(0, ROWS, BATCH_ROWS)]
    for start in (BATCH_ROWS, 5 * BATCH_ROWS, 15 * BATCH_ROWS, 100):
        assert ids_of(feed.batches(0, start)) == ids[start:]
    assert list(feed.batches(0, ROWS)) == []
    following = ids_of(feed.batches(1))
    assert sorted(following) == list(range(ROWS))
    assert (following != ids) is case.shuffles
    assert ids_of(case.open().batches(0)) == ids
    assert (ids_of(case.open(seed=4).batches(0)) != ids) is case.shuffles


def test_a_feed_resumed_twice_in_an_epoch_continues_where_it_was(case: Case) -> None:
    straight = [ids_of(case.open().batches(epoch)) for epoch in (0, 1)]
    seen: list[list[int]] = [[], []]
    state = case.open().state_dict()
    for num_batches in (3, 4, 9, 2):  # the third stop is at the epoch's very end, the fourth in the next one
        feed = case.open()
        epoch, position = feed.load_state_dict(stored(state))
        assert stored(feed.state_dict()) == stored(state)  # saved again before anything is read
        if position == ROWS:
            epoch, position = epoch + 1, 0
        batches = feed.batches(epoch, position)
        seen[epoch] += ids_of(islice(batches, num_batches))
        state = feed.state_dict()  # with batches gathered ahead that nobody has seen
        batches.close()  # type: ignore[attr-defined]
        assert stored(feed.state_dict()) == stored(state)
    assert seen[0] == straight[0]
    assert seen[1] == straight[1][: 2 * BATCH_ROWS]


def test_ranks_share_each_global_batch_whatever_their_number(case: Case) -> None:
    alone = list(case.open().batches(1))
    lanes = case.open().order.lanes
    for world_size in (2, 3) if lanes == 1 else (2, 4, 7, 64):
        feeds = [case.open(rank=rank, world_size=world_size) for rank in range(world_size)]
        for whole, *parts in zip(alone, *(feed.batches(1) for feed in feeds), strict=True):
            joined = np.concatenate([part.row_ids for part in parts])
            if lanes > 1:  # parts differ by whole lanes of this batch at most
                assert sorted(joined.tolist()) == sorted(whole.row_ids.tolist())
                assert max(p.rows for p in parts) - min(p.rows for p in parts) <= -(-whole.global_rows // 8)
                continue
            assert joined.tolist() == whole.row_ids.tolist()
            assert {(part.position, part.global_rows) for part in parts} == {(whole.position, whole.global_rows)}
            assert [part.first_row for part in parts] == [
                whole.first_row + sum(p.rows for p in parts[:rank]) for rank in range(world_size)
            ]
            assert max(p.rows for p in parts) - min(p.rows for p in parts) <= 1
            for part in parts:
                check_values(part)
        assert len({json.dumps(feed.state_dict()) for feed in feeds}) == 1


def test_another_world_size_continues_with_the_same_rows(case: Case) -> None:
    straight = ids_of(case.open().batches(0))
    first = case.open(rank=1, world_size=2)
    batches = first.batches(0)
    list(islice(batches, 5))
    state = stored(first.state_dict())
    parts = []
    for rank in range(3):
        feed = case.open(rank=rank, world_size=3)
        epoch, position = feed.load_state_dict(state)
        parts.append(list(feed.batches(epoch, position)))
    steps = [np.concatenate([part.row_ids for part in step]).tolist() for step in zip(*parts, strict=True)]
    expected = [straight[first : first + BATCH_ROWS] for first in range(5 * BATCH_ROWS, ROWS, BATCH_ROWS)]
    if first.order.lanes > 1:
        steps, expected = list(map(sorted, steps)), list(map(sorted, expected))
    assert steps == expected


def test_more_ranks_than_rows_read_each_row_once(case: Case) -> None:
    parts = [list(case.open(rank=rank, world_size=5, batch_rows=3).batches(0, ROWS - 7)) for rank in range(5)]
    assert {len(part) for part in parts} == {3}
    assert sorted(sum(part[step].rows for part in parts) for step in range(3)) == [1, 3, 3]
    empty = next(part[0] for part in parts if part[0].rows == 0)
    assert empty.columns["x"].shape == (0, 5)
    assert len({row for part in parts for batch in part for row in batch.row_ids.tolist()}) == 7


def test_reading_ahead_changes_nothing(case: Case) -> None:
    for prefetch in (0, 1, 8):
        feed = case.open(prefetch=prefetch)
        for number, batch in enumerate(islice(feed.batches(0), 4), start=1):
            assert feed.state_dict()["position"] == number * BATCH_ROWS == batch.position


def test_augmentation_numbers_follow_the_row(case: Case) -> None:
    def noisy(columns: dict[str, Tensor], generator: RowGenerator) -> dict[str, Tensor]:
        return {**columns, "noise": generator.normal(2), "side": generator.integers(0, 1000)}

    def opened(**place: int) -> Feed:
        feed = case.open(**place)
        feed.augment_with(noisy, seed=8)
        return feed

    def by_row(batches: Iterator[Batch]) -> dict[int, list[float]]:
        return {
            row: [*noise, side]
            for batch in batches
            for row, noise, side in zip(
                batch.row_ids.tolist(), batch.columns["noise"].tolist(), batch.columns["side"].tolist(), strict=True
            )
        }

    whole = by_row(opened().batches(1))
    assert len({tuple(values) for values in whole.values()}) == ROWS
    parts = [by_row(opened(rank=rank, world_size=3).batches(1, 5 * BATCH_ROWS)) for rank in range(3)]
    assert sum(map(len, parts)) == ROWS - 5 * BATCH_ROWS
    for part in parts:
        assert part == {row: whole[row] for row in part}
    other_epoch = by_row(islice(opened().batches(0), 2))
    assert all(whole[row] != values for row, values in other_epoch.items())


def test_augmentation_that_loses_rows_is_refused(case: Case) -> None:
    feed = case.open()
    feed.augment_with(lambda columns, _: {name: column[1:] for name, column in columns.items()}, seed=0)
    with pytest.raises(SpecError, match=r"augment returned a tensor of shape \[63, 5\] for column 'x' in a batch of 64 rows"):
        list(feed.batches(0))


def test_state_of_other_augmentation_seed_is_refused(case: Case) -> None:
    def opened(seed: int) -> Feed:
        feed = case.open()
        feed.augment_with(lambda columns, _: columns, seed)
        return feed

    state = stored(opened(1).state_dict())
    assert opened(1).load_state_dict(state) == (0, 0)
    for other in (opened(2), case.open()):
        with pytest.raises(ResumeError, match="seed of the augmentation: 1 in the checkpoint"):
            other.load_state_dict(state)


def test_batches_may_be_kept_and_changed(case: Case) -> None:
    kept = list(islice(case.open().batches(0), 6))
    kept[0].columns["x"].zero_()
    for batch in kept[1:]:
        check_values(batch)
    assert ids_of(islice(case.open().batches(0), 1)) == kept[0].row_ids.tolist()


def test_a_reader_that_stops_leaves_no_thread_behind(case: Case) -> None:
    before = feed_threads()
    batches = case.open(prefetch=1).batches(0)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    dropped = case.open(prefetch=1).batches(0)
    next(dropped)
    del dropped
    gc.collect()
    assert feed_threads() == before


def feed_threads() -> int:
    return sum(thread.name == "penstock-feed" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_rows": 32}, ["batch_rows: 32 in the checkpoint, 64 now", "--fresh"]),
        ({"content": "other"}, ["content of the dataset", "other"]),
        ({"rows": 7}, ["rows of an epoch (data, sample, epoch_rows, last_batch): 7 in the checkpoint, 1003 now"]),
        ({"fingerprint": "f"}, ["fingerprint"]),
        ({"seed": 99}, ["seed of the shuffle: 99 in the checkpoint"]),
        ({"position": ROWS + 1}, ["1004"]),
        ({"position": -1}, ["position"]),
        ({"position": "64"}, ["position", "integer"]),
        ({"epoch": None}, ["epoch"]),
        ({"version": 2}, ["version"]),
        ({"surprise": 1}, ["surprise", "--fresh"]),
    ],
)
def test_state_of_other_data_is_refused(case: Case, change: dict[str, Any], words: list[str]) -> None:
    feed = case.open()
    before = feed.state_dict()
    with pytest.raises(ResumeError) as caught:
        feed.load_state_dict(stored(before) | change)
    for word in words:
        assert word in str(caught.value)
    assert "pydantic" not in str(caught.value)
    assert feed.state_dict() == before


@pytest.mark.parametrize("lacks", ["epoch", "position"])
def test_incomplete_state_is_refused(case: Case, lacks: str) -> None:
    feed = case.open()
    state = {name: value for name, value in stored(feed.state_dict()).items() if name != lacks}
    with pytest.raises(ResumeError, match=lacks):
        feed.load_state_dict(state)


def test_a_position_within_a_step_is_refused(case: Case) -> None:
    feed = case.open()
    if feed.order.by_length is not None:  # these steps begin at any position
        assert feed.load_state_dict(stored(feed.state_dict()) | {"position": 5}) == (0, 5)
        return
    with pytest.raises(ResumeError, match=r"position 5 is within a step.*batch_rows=64"):
        feed.load_state_dict(stored(feed.state_dict()) | {"position": 5})
    assert feed.load_state_dict(stored(feed.state_dict()) | {"position": feed.num_rows}) == (0, feed.num_rows)


@pytest.mark.parametrize(("epoch", "start", "words"), [(-1, 0, "epoch -1"), (0, -1, str(ROWS)), (0, ROWS + 1, str(ROWS))])
def test_a_position_outside_the_epoch_is_refused(case: Case, epoch: int, start: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list(case.open().batches(epoch, start))
