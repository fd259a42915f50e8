"""What lanes are for: a node fetches its part of the data and needs disk for it, and no step differs for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import open_feed
from penstock.errors import PreflightError, ResumeError, SpecError
from penstock.ingest.feed.batch import FeedShare, own_positions
from penstock.ingest.feed.cached import CachedFeed, open_cached_feed
from penstock.ingest.feed.mapped_shards import most_of_a_rank
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.phases import fetched_so_far
from penstock.ingest.shuffle.order import Order, make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.storage import Storage
from tests.conformance.feed_cases import ROWS, write_dataset


@pytest.fixture
def many(remote: Storage, tmp_path: Path) -> DatasetManifest:
    return write_dataset(remote, tmp_path / "many", 40)


def order_of(manifest: DatasetManifest, **shuffle: Any) -> Order:
    spec = ShuffleSpec.model_validate({"seed": 3, **shuffle})
    return make_order(spec, ROWS, [shard.rows for shard in manifest.shards], 64)


def opened(storage: Storage, manifest: DatasetManifest, order: Order, **place: Any) -> CachedFeed:
    return open_cached_feed([(storage, manifest)], "train", batch_rows=64, order=order, **place)


WINDOWS = {"mode": "windowed", "window_of": "shards", "window_rows": 200}


@pytest.mark.parametrize(
    ("shuffle", "most"),
    [({}, 1.2), ({"lanes": 1}, 4.0), (WINDOWS, 1.2), ({"mode": "windowed", "window_rows": 200}, 1.2)],
    ids=["lanes", "one", "shards", "runs"],
)
def test_nodes_fetch_each_shard_of_their_lanes_once(
    remote: Storage, many: DatasetManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: Any, most: float
) -> None:
    order, whole = order_of(many, **shuffle), sum(shard.size_bytes for shard in many.shards)
    fetched: list[list[int]] = [[], []]
    rows: list[int] = []
    for rank in range(4):
        monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / f"node{rank}"))
        feed: CachedFeed | None = None
        for epoch in (0, 1):
            before = fetched_so_far().bytes
            feed = feed or opened(remote, many, order, rank=rank, world_size=4)
            rows += [row for batch in feed.batches(epoch) for row in batch.row_ids.tolist()]
            fetched[epoch].append(fetched_so_far().bytes - before)
    assert sorted(rows) == sorted([*range(ROWS)] * 2)
    # Three cuts between the four nodes, of 40 small shards.
    assert most / 1.25 <= sum(fetched[0]) / whole <= most
    assert sum(fetched[1]) == 0


def test_refusal_of_small_disk_counts_the_nodes_share(
    remote: Storage, many: DatasetManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sum(shard.size_bytes for shard in many.shards)
    monkeypatch.setenv("PENSTOCK_CACHE_BYTES", str(int(0.75 * whole)))
    with pytest.raises(PreflightError, match="global needs all"):
        opened(remote, many, order_of(many, lanes=1), rank=0, world_size=4)
    place = {"order": order_of(many), "rank": 1, "world_size": 4}
    assert sum(batch.rows for batch in opened(remote, many, **place).batches(0)) == ROWS // 64 * 16 + 11
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # all four on this node
    with pytest.raises(PreflightError, match=r"global needs this node's .* the cache in .* may hold") as refused:
        opened(remote, many, **place)
    assert "PENSTOCK_CACHE_BYTES" in refused.value.next_step


def test_windows_of_more_lanes_than_the_disk_holds_are_refused(
    remote: Storage, many: DatasetManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_BYTES", str(sum(shard.size_bytes for shard in many.shards) // 2))
    with pytest.raises(PreflightError, match="the windows of 32 lanes need about 40 shards at once on a node") as refused:
        opened(remote, many, order_of(many, **WINDOWS))
    assert "fewer shuffle.lanes" in refused.value.next_step
    assert opened(remote, many, order_of(many, **{**WINDOWS, "lanes": 4, "window_rows": 2})).num_rows == ROWS


def test_local_ranks_map_shards_of_their_lanes_only(storage: Storage, tmp_path: Path) -> None:
    manifest = write_dataset(storage, tmp_path / "many", 40)
    feed = opened(storage, manifest, order_of(manifest), rank=1, world_size=4)
    list(feed.batches(0))
    assert len(feed._rows._opened) <= 40 // 4 + 6


def test_more_ranks_than_lanes_share_a_batch_evenly() -> None:
    for world_size in (5, 7, 64):
        parts = [
            own_positions(FeedShare(64, rank, world_size, lanes=4), [(0, 64), (64, 128), (128, 150)])
            for rank in range(world_size)
        ]
        for number, (begin, stop) in enumerate([(0, 64), (64, 128), (128, 150)]):
            joined = np.concatenate([part[number] for part in parts])
            assert sorted(joined.tolist()) == list(range(begin, stop))
            assert max(len(part[number]) for part in parts) <= -(-(stop - begin) // world_size)
        assert all(len(set((part[0] % 4).tolist())) <= 2 for part in parts), "of one lane, or where two meet"


@pytest.mark.parametrize("last", ["drop", "fill"])
@pytest.mark.parametrize("world_size", [1, 4, 9])
def test_last_batch_of_lanes_is_dropped_or_filled(storage: Storage, tmp_path: Path, last: Any, world_size: int) -> None:
    manifest = write_dataset(storage, tmp_path / "many", 10)
    order = order_of(manifest)
    assert order.lanes == 8
    feeds = [opened(storage, manifest, order, rank=rank, world_size=world_size, last=last) for rank in range(world_size)]
    steps = [list(step) for step in zip(*(feed.batches(1) for feed in feeds), strict=True)]
    assert len(steps) == (15 if last == "drop" else 16)
    assert {sum(part.rows for part in step) for step in steps} == {64}
    assert len({tuple(part.rows for part in step) for step in steps}) == 1, "each rank has equal batches"
    seen = np.concatenate([part.row_ids for step in steps for part in step])
    assert np.bincount(seen, minlength=ROWS).max() == (1 if last == "drop" else 2)
    if last == "fill":
        assert set(seen.tolist()) == set(range(ROWS))
        again = np.flatnonzero(np.bincount(seen) == 2)
        assert set(again.tolist()) <= set(order.ids(1, 0, 32).tolist())
        alone = opened(storage, manifest, order, last=last)
        *_, batch = alone.batches(1)
        assert sorted(batch.row_ids.tolist()) == sorted(np.concatenate([part.row_ids for part in steps[-1]]).tolist())


def test_open_feed_takes_lanes_and_refuses_a_state_of_others(storage: Storage, tmp_path: Path) -> None:
    manifest = write_dataset(storage, tmp_path / "many", 10)
    manifest.write(storage)
    address = storage.uri("datasets/k")
    feed = open_feed(address, batch_rows=64)
    assert feed.order.lanes == 8 and open_feed(address, batch_rows=83).order.lanes == 1
    with pytest.raises(ResumeError, match="fingerprint of the order"):
        open_feed(address, batch_rows=64, lanes=1).load_state_dict(feed.state_dict())
    with pytest.raises(SpecError, match="lanes: 8 gives each worker its own shards, and sample draws from all rows"):
        open_feed(address, batch_rows=64, lanes=8, sample={"balance": "label"})
    with pytest.raises(SpecError, match="cannot be mixed with lanes=8"):
        open_feed([address, address], batch_rows=64, lanes=8)
    assert open_feed([address, address], batch_rows=64).order.lanes == 1


def test_needs_of_a_worker_are_those_of_its_lanes(many: DatasetManifest) -> None:
    sizes = many.shards.size_bytes
    one = most_of_a_rank(order_of(many, lanes=1), sizes, FeedShare(64, 0, 4))
    assert one == {"rows": 251, "fetch_bytes": sum(sizes), "disk_bytes": sum(sizes)}
    some = most_of_a_rank(order_of(many), sizes, FeedShare(64, 0, 4))
    assert some["rows"] == 256 and some["disk_bytes"] == some["fetch_bytes"] < 0.45 * sum(sizes)
    few = most_of_a_rank(order_of(many, lanes=2, **{**WINDOWS, "window_rows": 2}), sizes, FeedShare(64))
    assert few["fetch_bytes"] == sum(sizes) and few["disk_bytes"] < 0.2 * sum(sizes)
    assert os.environ.get("LOCAL_WORLD_SIZE") is None


@pytest.mark.parametrize("last", ["keep", "drop", "fill"])
@pytest.mark.parametrize("lanes", [1, 7, 32])
def test_stated_rows_are_those_of_the_rank_with_most(many: DatasetManifest, lanes: int, last: Any) -> None:
    order, sizes = order_of(many, lanes=lanes), many.shards.size_bytes
    for world_size in (1, 2, 3, 4, 7, 48, 64, 100):
        parts = [FeedShare(64, rank, world_size, last=last, lanes=lanes) for rank in range(world_size)]
        end = parts[0].positions(ROWS)
        cuts = [(begin, min(begin + 64, end)) for begin in range(0, end, 64)]
        most = max(sum(map(len, own_positions(part, cuts))) for part in parts)
        assert most_of_a_rank(order, sizes, parts[0])["rows"] in range(most, most + 2), world_size
