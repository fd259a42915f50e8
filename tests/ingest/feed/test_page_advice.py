"""Shards that do not fit into memory: the same rows, and the kernel gets advice on which pages come next."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import penstock.ingest.feed.mapped_shards
import penstock.ingest.feed.page_advice
from penstock.ingest.feed.cached import open_cached_feed
from penstock.ingest.feed.page_advice import free_memory
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.materialize.shard_file import open_shard
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.storage import Storage
from tests.conformance.feed_cases import ROWS, check_values, write_dataset

ORDERS: list[dict[str, Any]] = [
    {"mode": "global"},
    {"mode": "windowed", "window_rows": 128},
    {"sample": {"balance": "label"}},
    {"by_length": {"column": "tokens", "pool_batches": 3}},
]


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(address, size, advice) of all advice to the kernel, which gets it, too; there is no memory to spare."""
    seen = []
    really = penstock.ingest.feed.page_advice._advise

    def advise(address: int, size: int, advice: int) -> None:
        seen.append((address, size, advice))
        really(address, size, advice)

    monkeypatch.setattr(penstock.ingest.feed.page_advice, "_advise", advise)
    monkeypatch.setattr(penstock.ingest.feed.mapped_shards, "free_memory", lambda: 0)
    monkeypatch.setattr(penstock.ingest.feed.mapped_shards, "PAGES_AHEAD_ROWS", 100)
    return seen


@pytest.mark.parametrize("shuffle", ORDERS, ids=str)
def test_pages_are_prefetched_before_rows_are_read(
    storage: Storage,
    tmp_path: Path,
    advised: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
    shuffle: dict[str, Any],
) -> None:
    manifest = write_dataset(storage, tmp_path / "scratch", 4, lists=True)
    order = make_order(ShuffleSpec.model_validate({"seed": 3, **shuffle}), ROWS)
    feed = open_cached_feed([(storage, manifest)], "train", batch_rows=64, order=order)
    batches = list(feed.batches(1))
    for batch in batches:
        check_values(batch)
    asked = [(start, start + size) for start, size, advice in advised if advice == mmap.MADV_WILLNEED]
    assert {advice for _, _, advice in advised} == {mmap.MADV_RANDOM, mmap.MADV_WILLNEED}
    # Every row of `x` lies in what was asked for.
    bounds = np.cumsum([0, *(shard.rows for shard in manifest.shards)])
    for row in np.unique(np.concatenate([batch.row_ids for batch in batches])).tolist():
        block = int(np.searchsorted(bounds, row, side="right")) - 1
        x: Any = feed._rows._opened[block]["x"]
        begin = x.ctypes.data + (row - int(bounds[block])) * 20
        assert any(low <= begin and begin + 20 <= high for low, high in asked), row

    monkeypatch.setattr(penstock.ingest.feed.mapped_shards, "free_memory", lambda: 1 << 40)
    advised.clear()
    plain = open_cached_feed([(storage, manifest)], "train", batch_rows=64, order=order)
    assert [batch.row_ids.tolist() for batch in plain.batches(1)] == [batch.row_ids.tolist() for batch in batches]
    assert not advised, "what fits is the kernel's business"


def test_rank_prefetches_pages_of_its_rows_only(
    storage: Storage, manifest: DatasetManifest, advised: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("penstock.ingest.feed.gather.RowGather._prefetch_pages", lambda self, ids: asked.extend(ids.tolist()))
    order = make_order(ShuffleSpec(seed=3), ROWS)
    for rank in range(3):
        asked.clear()
        feed = open_cached_feed([(storage, manifest)], "train", batch_rows=64, order=order, rank=rank, world_size=3)
        read = [row for batch in feed.batches(0) for row in batch.row_ids.tolist()]
        assert sorted(asked) == sorted(read)


def test_heavy_rows_are_prefetched_fewer_at_a_time(
    storage: Storage, manifest: DatasetManifest, advised: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ahead_rows() -> int:
        order = make_order(ShuffleSpec(seed=3), ROWS)
        return open_cached_feed([(storage, manifest)], "train", batch_rows=64, order=order)._rows.ahead_rows

    assert ahead_rows() == 100
    all_bytes = sum(shard.size_bytes for shard in manifest.shards_of("train"))
    monkeypatch.setattr(penstock.ingest.feed.mapped_shards, "PAGES_AHEAD_BYTES", all_bytes * 10 // ROWS)
    assert ahead_rows() in (9, 10)
    monkeypatch.setattr(penstock.ingest.feed.mapped_shards, "PAGES_AHEAD_BYTES", 1)
    assert ahead_rows() == 1


def test_unshuffled_rows_get_no_page_advice(
    storage: Storage, manifest: DatasetManifest, advised: list[tuple[int, int, int]]
) -> None:
    order = make_order(ShuffleSpec(mode="none"), ROWS)
    assert (
        sum(batch.rows for batch in open_cached_feed([(storage, manifest)], "train", batch_rows=64, order=order).batches(0))
        == ROWS
    )
    assert not advised


def test_neighbouring_rows_are_prefetched_together(
    storage: Storage, manifest: DatasetManifest, advised: list[tuple[int, int, int]]
) -> None:
    image: Any = open_shard(storage.local_path(manifest.shards[-1].path)).column("image")
    penstock.ingest.feed.page_advice.read_ahead(image, np.array([0, 1, 2, 5]))
    assert advised == [(image.ctypes.data, 36, mmap.MADV_WILLNEED)]


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "5000"}, 5000),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "7000"}, 7000),
        ("0::/host/path\n", {"memory.max": "6000"}, 6000),  # inside a container
        ("9:memory:/a\n1:cpu,cpuacct:/a\n", {"memory/a/memory.limit_in_bytes": "4000"}, 4000),
        ("9:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("0::/\n", {}, None),
    ],
)
def test_cgroup_limits_free_memory(tmp_path: Path, own: str, files: dict[str, str], expected: int | None) -> None:
    for name, content in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(content + "\n")
    (tmp_path / "own").write_text(own)
    available = psutil.virtual_memory().available
    found = free_memory(tmp_path / "own", tmp_path / "groups")
    assert found == expected if expected is not None else abs(found - available) < 1 << 30
    assert free_memory(tmp_path / "absent") > 1 << 20
