"""Opening a feed, fetching its shards, and what happens when something about them is wrong."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from penstock.errors import DataError, SpecError
from penstock.ingest.feed.batch import Batch, FeedShare, share
from penstock.ingest.feed.cached import GROUP_BYTES, CachedFeed, gathered, open_cached_feed
from penstock.ingest.feed.gather import RowGather
from penstock.ingest.feed.node_cache import NodeCache
from penstock.ingest.feed.stream import MemoryFeed, OpenTables, StreamFeed, select_prepared
from penstock.ingest.feed.stream_tasks import StreamTables
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.schema import ColumnInfo, FeedSchema
from penstock.ingest.shuffle.order import Order, ShardRows, make_order
from penstock.ingest.spec import LengthSpec, ShuffleSpec
from penstock.storage import Storage
from tests import ROOT
from tests.conformance.conftest import ray_cluster  # noqa: F401 - a fixture
from tests.conformance.feed_cases import (
    LISTS,
    ROWS,
    SCHEMA,
    check_values,
    lists_table,
    order_of,
    put_dataset,
    table,
    tables,
    values_of,
    write_dataset,
)

GLOBAL = order_of("global", 3)


def test_feed_holds_at_most_four_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.ingest.feed.read_ahead.LOST_S", 0.0)  # a thread from the start
    width, batch_rows, rows = 1 << 16, 32, 160
    data = np.ones((rows, width), np.float32)
    column = ColumnInfo(name="x", dtype="float32", shape=(width,))
    gather = RowGather([column], [rows], lambda _: {"x": data})
    order = make_order(ShuffleSpec(mode="global", lanes=1), rows, [rows], batch_rows)
    feed = CachedFeed(FeedSchema(columns=(column,)), "train", "content", gather, order, FeedShare(batch_rows=batch_rows))
    batch_bytes = batch_rows * width * 4
    assert batch_bytes == 2 * GROUP_BYTES
    tracemalloc.start()
    for epoch in range(3):
        for batch in feed.batches(epoch):
            assert (batch.columns["x"] @ torch.ones(width, 4)).shape == (batch_rows, 4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batch_bytes < peak < 4.2 * batch_bytes


def test_only_requested_columns_are_gathered(storage: Storage, manifest: DatasetManifest) -> None:
    feed = open_cached_feed([(storage, manifest)], "train", batch_rows=10, order=GLOBAL, columns=["label", "x"])
    assert [column.name for column in feed.schema.columns] == ["label", "x"]
    assert list(next(feed.batches(0)).columns) == ["label", "x"]
    whole = next(open_cached_feed([(storage, manifest)], "train", batch_rows=10, order=GLOBAL).batches(0))
    assert set(whole.columns) == {"x", "image", "label"}  # and not where the rows came from
    with pytest.raises(KeyError, match="nosuch"):
        open_cached_feed([(storage, manifest)], "train", batch_rows=10, order=GLOBAL, columns=["nosuch"])


def test_missing_split_is_named(storage: Storage, manifest: DatasetManifest) -> None:
    with pytest.raises(DataError, match=r"'test'; splits with rows: train"):
        open_cached_feed([(storage, manifest)], "test", batch_rows=10, order=GLOBAL)


@pytest.mark.parametrize("wrong", [{"order": Order(mode="none", rows=5)}, {"rank": 2}, {"batch_rows": 0}, {"prefetch": -1}])
def test_invalid_arguments_are_refused(storage: Storage, manifest: DatasetManifest, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        open_cached_feed([(storage, manifest)], "train", **({"batch_rows": 10, "order": GLOBAL, "world_size": 2} | wrong))  # type: ignore[arg-type]


def test_a_missing_shard_is_named_before_reading(storage: Storage, manifest: DatasetManifest) -> None:
    storage.delete(manifest.shards[2].path)
    with pytest.raises(DataError, match=f"{manifest.shards[2].path} is missing"):
        open_cached_feed([(storage, manifest)], "train", batch_rows=10, order=GLOBAL)


def test_shard_of_wrong_size_is_named_before_reading(storage: Storage, manifest: DatasetManifest) -> None:
    path = manifest.shards[1].path
    storage.write_bytes(path, storage.read_bytes(path)[:-1])
    with pytest.raises(DataError, match=path):
        open_cached_feed([(storage, manifest)], "train", batch_rows=10, order=GLOBAL)


def test_damaged_shard_file_ends_epoch_with_its_name(storage: Storage, manifest: DatasetManifest) -> None:
    path = manifest.shards[1].path
    storage.write_bytes(path, b"x" * manifest.shards[1].size_bytes)
    feed = open_cached_feed([(storage, manifest)], "train", batch_rows=10, order=GLOBAL)
    with pytest.raises(DataError, match=path):
        list(feed.batches(0))


def test_shard_that_differs_from_manifest_is_refused(storage: Storage, manifest: DatasetManifest) -> None:
    columns = (ColumnInfo(name="x", dtype="float32", shape=(4,)),)
    wrong = manifest.model_copy(update={"feed_schema": FeedSchema(columns=columns)})
    with pytest.raises(DataError, match=r"rows of x: float32\[5\], the manifest lists \d+ rows of x: float32\[4\]"):
        list(open_cached_feed([(storage, wrong)], "train", batch_rows=10, order=GLOBAL).batches(0))


def test_remote_shards_are_fetched_once_and_named_by_content(
    remote: Storage, manifest: DatasetManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    get_file = Storage.get_file
    monkeypatch.setattr(Storage, "get_file", lambda self, path, local: (fetched.append(path), get_file(self, path, local)))
    for _ in range(2):
        for batch in open_cached_feed([(remote, manifest)], "train", batch_rows=100, order=GLOBAL).batches(0):
            check_values(batch)
    assert sorted(fetched) == sorted(shard.path for shard in manifest.shards)
    names = {path.name for path in (tmp_path / "cache").rglob("*.arrow")}
    assert names == {f"{shard.digest}.arrow" for shard in manifest.shards}
    assert not list((tmp_path / "cache").rglob(".*.part"))


@pytest.mark.parametrize("mode", ["none", "windowed"])
def test_rank_fetches_all_its_shards_ahead(remote: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    manifest = write_dataset(remote, tmp_path / "many", 40)  # far more of them than may be on their way at once
    fetched: list[str] = []
    get_file = Storage.get_file

    def noted(self: Storage, path: str, local: Path) -> None:
        fetched.append(threading.current_thread().name.rpartition("_")[0])
        get_file(self, path, local)

    monkeypatch.setattr(Storage, "get_file", noted)
    for mine, rank in enumerate((0, 3)):
        order = order_of(mode, 5 + mine)
        feed = open_cached_feed([(remote, manifest)], "train", batch_rows=ROWS, order=order, rank=rank, world_size=4)
        (batch,) = feed.batches(0)
        needed = {shard_of(manifest, row) for row in batch.row_ids.tolist()}
        assert len(fetched) == len(needed), "no other rank's shards" if len(fetched) > len(needed) else "all of its own"
        if mode == "none":  # where shards are opened in the order in which they were asked for
            assert set(fetched) == {"penstock-fetch"}, "a shard was fetched by who needed it"
        shutil.rmtree(tmp_path / "cache")
        fetched.clear()


def shard_of(manifest: DatasetManifest, row: int) -> int:
    return int(np.searchsorted(np.cumsum([shard.rows for shard in manifest.shards]), row, side="right"))


def test_several_iterators_read_one_feed_at_once(remote: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_dataset(remote, tmp_path / "many", 30)
    monkeypatch.setattr("penstock.ingest.feed.cached.MAX_GROUP_BATCHES", 1)
    rows = [shard.rows for shard in manifest.shards]
    order = Order(mode="windowed", seed=3, rows=ROWS, window_rows=100, shards=ShardRows.of(tuple(rows)))
    # So small that shards are let go all the time, while others gather from them.
    monkeypatch.setattr(
        "penstock.ingest.feed.node_cache.NodeCache.budget_bytes", 20 * max(shard.size_bytes for shard in manifest.shards)
    )
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(10):
            feed = open_cached_feed([(remote, manifest)], "train", batch_rows=20, order=order)
            for batches in zip(*(feed.batches(epoch) for epoch in range(6)), strict=True):
                for batch in batches:
                    check_values(batch)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_changing_a_batch_does_not_change_others(
    storage: Storage, manifest: DatasetManifest, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ingest.feed.read_ahead.LOST_S", 0.0)  # read ahead from the start
    feed = open_cached_feed([(storage, manifest)], "train", batch_rows=10, order=GLOBAL, prefetch=prefetch)
    weights = torch.ones(5, requires_grad=True)
    losses = [(batch.columns["x"].div_(2) * weights).sum() for batch in feed.batches(0)]  # each keeps its batch for backward
    torch.stack(losses).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == (values_of(np.arange(ROWS))["x"].sum(0, dtype=np.float64) / 2).tolist()


@pytest.mark.s3
def test_a_feed_reads_from_s3(s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    storage = Storage(f"{s3_bucket}/state")
    manifest = write_dataset(storage, tmp_path / "scratch", 3)
    feed = open_cached_feed([(storage, manifest)], "train", batch_rows=100, order=GLOBAL)
    seen = []
    for batch in feed.batches(0):
        check_values(batch)
        seen += batch.row_ids.tolist()
    assert sorted(seen) == list(range(ROWS))
    gone = manifest.shards[0].model_copy(update={"path": "units/nosuch.arrow", "digest": "0" * 32})
    with pytest.raises(DataError, match="nosuch"):
        NodeCache(tmp_path / "cache").hold(storage, gone)


@pytest.mark.parametrize(("rows", "world_size"), [(10, 3), (0, 2), (2, 5), (256, 4)])
def test_shares_make_up_the_batch(rows: int, world_size: int) -> None:
    parts = [share(rows, rank, world_size) for rank in range(world_size)]
    assert [row for low, high in parts for row in range(low, high)] == list(range(rows))


@pytest.mark.parametrize("mode", ["global", "windowed"])
@pytest.mark.parametrize("lost_s", [0.0, 3e-5, 1e9])
def test_batches_are_equal_with_and_without_thread(
    storage: Storage, manifest: DatasetManifest, mode: str, lost_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread gathers from the start, after some groups (the clock decides), or never."""
    monkeypatch.setattr("penstock.ingest.feed.cached.GROUP_BYTES", 1)
    monkeypatch.setattr("penstock.ingest.feed.read_ahead.LOST_S", lost_s)
    for cost in ("HAND_OVER_S", "OTHER_CACHE_S"):
        monkeypatch.setattr(f"penstock.ingest.feed.read_ahead.{cost}", -1e-6)
    order = order_of(mode, 3)
    feed = open_cached_feed([(storage, manifest)], "train", batch_rows=20, order=order, rank=1, world_size=2)
    with torch.inference_mode():
        batches = list(feed.batches(0))
    ids = order.ids(0, 0, ROWS)
    assert [batch.row_ids.tolist() for batch in batches] == [
        ids[first:][10:20].tolist() if first + 20 <= ROWS else ids[first + (ROWS - first) // 2 :].tolist()
        for first in range(0, ROWS, 20)
    ]
    for batch in batches:
        check_values(batch)
        assert not batch.columns["x"].is_inference()


def test_table_with_missing_or_other_column_is_refused() -> None:
    whole = table(np.arange(60))
    without = whole.drop_columns(["label"])
    assert select_prepared(whole, SCHEMA.columns[1:]).column_names == ["image", "label"]
    with pytest.raises(DataError, match="lack column 'label'"):
        select_prepared(without, SCHEMA.columns)
    with pytest.raises(DataError, match="have a column label: float64, the schema has label: int64"):
        select_prepared(without.append_column("label", pa.array(np.ones(60))), SCHEMA.columns)


def test_memory_blocks_are_read_in_other_processes(ray_cluster: None) -> None:  # noqa: F811
    import ray

    dataset = put_dataset()
    assert len(dataset.blocks) > 3
    assert dataset.num_rows == ROWS

    @ray.remote(num_cpus=1)
    def read(dataset: object, rank: int) -> list[int]:
        feed = MemoryFeed(dataset, batch_rows=50, order=GLOBAL, rank=rank, world_size=2)  # type: ignore[arg-type]
        return [row for batch in feed.batches(0) for row in batch.row_ids.tolist()]

    parts = ray.get([read.remote(dataset, rank) for rank in range(2)])
    assert sorted(parts[0] + parts[1]) == list(range(ROWS))


def test_lists_in_memory_are_mapped_and_not_copied(ray_cluster: None) -> None:  # noqa: F811
    import ray

    (block, *_) = put_dataset(lists=True).blocks
    first, second = ray.get(block), ray.get(block)
    for name in ("tokens", "marks", "picture"):
        for part in ("offsets", "values"):
            here, there = getattr(first[name], part), getattr(second[name], part)
            assert here.nbytes
            assert here.ctypes.data == there.ctypes.data


def test_long_lists_in_memory_are_gathered_in_small_groups(
    ray_cluster: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []

    def counted(rows: RowGather, cuts: Sequence[tuple[int, int]], own: Any, ids: Any) -> list[Batch]:
        sizes.append(len(cuts))
        return gathered(rows, cuts, own, ids)

    monkeypatch.setattr("penstock.ingest.feed.cached.gathered", counted)
    dataset = put_dataset(lists=True)
    for size_bytes, most in ((dataset.size_bytes, 101), (ROWS * GROUP_BYTES, 1)):
        feed = MemoryFeed(replace(dataset, size_bytes=size_bytes), batch_rows=10, order=GLOBAL, columns=["tokens"])
        list(feed.batches(0))
        assert max(sizes) <= most
        assert (len(sizes) == 101) is (most == 1)
        sizes.clear()


def from_begin(tables: Callable[[], Iterator[pa.Table]]) -> OpenTables:
    """A stream that is always read from its first row."""
    return lambda _epoch, _row: (0, tables())


LISTS_ORDERS = [
    None,
    LengthSpec(column="tokens", pool_batches=3),
    LengthSpec(column="tokens", pool_batches=3, batch_entries=60),
    LengthSpec(column="marks", pool_batches=3, batch_entries=20),
]


@pytest.mark.parametrize("by_length", LISTS_ORDERS, ids=str)
def test_unshuffled_stream_yields_batches_of_cached_dataset(tmp_path: Path, by_length: LengthSpec | None) -> None:
    storage = Storage(str(tmp_path / "storage"))
    manifest = write_dataset(storage, tmp_path / "scratch", 5, lists=True)
    order = Order(mode="none", rows=ROWS, by_length=by_length)
    whole = list(open_cached_feed([(storage, manifest)], "train", batch_rows=40, order=order).batches(1))
    for rank, start in ((0, 0), (1, 0), (1, len(whole) // 2)):
        place: dict[str, Any] = {"batch_rows": 40, "order": order, "rank": rank, "world_size": 2}
        cached = open_cached_feed([(storage, manifest)], "train", **place)
        content = cached.state_dict()["content"]
        parts = np.split(np.arange(ROWS), [7, 500])
        stream = StreamFeed(
            from_begin(partial(map, lists_table, parts)), manifest.feed_schema, "train", content=content, **place
        )
        first = whole[start].first_row
        for ours, theirs in zip(stream.batches(1, first), cached.batches(1, first), strict=True):
            assert ours.row_ids.tolist() == theirs.row_ids.tolist()
            assert (ours.position, ours.first_row, ours.global_rows) == (theirs.position, theirs.first_row, theirs.global_rows)
            assert ours.columns.keys() == theirs.columns.keys()
            assert all(tensor.equal(theirs.columns[name]) for name, tensor in ours.columns.items())
        assert stream.state_dict() == cached.state_dict()


def test_stream_by_length_holds_at_most_two_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order(mode="none", rows=ROWS, by_length=LengthSpec(column="tokens", pool_batches=3))
    feed = StreamFeed(
        lambda *_: (0, iter([lists_table(np.arange(ROWS))])), LISTS, "train", content="c", batch_rows=40, order=order
    )
    held: list[int] = []
    close_before = RowGather.close_before

    def counted(rows: RowGather, before: int) -> None:
        held.append(len(rows._opened))
        close_before(rows, before)
        held.append(len(rows._opened))

    monkeypatch.setattr(RowGather, "close_before", counted)
    batches = feed.batches(0)
    assert len(list(islice(batches, 10))) == 10
    batches.close()  # type: ignore[attr-defined]
    assert max(held) == 2 * 3
    assert held[-1] == 0


def test_a_stream_whose_augmentation_fails_is_closed() -> None:
    closed = threading.Event()

    def open_stream() -> Iterator[pa.Table]:
        try:
            yield from tables()
        finally:
            closed.set()

    feed = StreamFeed(from_begin(open_stream), SCHEMA, "train", content="c", batch_rows=40, order=order_of("none", 0))
    feed.augment_with(lambda columns, _: {}[0], seed=1)
    with pytest.raises(KeyError) as caught:
        next(feed.batches(0))
    assert closed.is_set(), caught  # though the error, with all its frames, is still looked at


@pytest.mark.parametrize(
    ("mode", "tables_given"),
    [
        ("windowed", [1, 1, 2, 2, 3]),  # windows of 150 rows
        ("none", [2, 2, 2, 2, 4]),  # a few batches of 64 rows together
    ],
)
def test_stream_batch_waits_for_few_further_rows(mode: str, tables_given: list[int]) -> None:
    given: list[int] = []

    def given_tables() -> Iterator[pa.Table]:
        for part in tables(cuts=150):
            given.append(part.num_rows)
            yield part

    feed = StreamFeed(
        lambda *_: (0, given_tables()), SCHEMA, "train", content="c", batch_rows=64, order=order_of(mode, 1), prefetch=0
    )
    windows = [len(given) for _ in feed.batches(0)]
    assert windows[:5] == tables_given
    assert windows[-1] == 7


def test_stream_by_length_needs_lists() -> None:
    order = Order(mode="none", rows=ROWS, by_length=LengthSpec(column="label"))
    with pytest.raises(SpecError, match="is not a column of lists"):
        StreamFeed(from_begin(tables), LISTS, "train", content="c", batch_rows=40, order=order)


def test_a_stream_refuses_a_global_order() -> None:
    with pytest.raises(SpecError, match="windowed"):
        StreamFeed(from_begin(tables), SCHEMA, "train", content="c", batch_rows=5, order=GLOBAL)


@pytest.mark.parametrize(("given", "words"), [(90, "only 90"), (110, "more than 100")])
def test_stream_of_other_length_is_an_error(given: int, words: str) -> None:
    order = Order(mode="windowed", seed=1, rows=100, window_rows=40)
    feed = StreamFeed(from_begin(lambda: tables(rows=given, cuts=7)), SCHEMA, "train", content="c", batch_rows=8, order=order)
    with pytest.raises(DataError, match=words):
        list(feed.batches(0))


def test_stream_windows_have_different_orders() -> None:
    order = Order(mode="windowed", seed=1, rows=160, window_rows=40)
    feed = StreamFeed(from_begin(lambda: tables(rows=160, cuts=7)), SCHEMA, "train", content="c", batch_rows=40, order=order)
    seen = [batch.row_ids for epoch in (0, 1) for batch in feed.batches(epoch)]
    for number, ids in enumerate(seen):
        assert sorted(ids.tolist()) == list(range(number % 4 * 40, number % 4 * 40 + 40))
    assert len({tuple((ids % 40).tolist()) for ids in seen}) == 8


@pytest.mark.slow
def test_stream_raises_users_error(ray_cluster: None) -> None:  # noqa: F811
    def broken(item: int) -> Iterator[pa.Table]:
        if item == 1:
            raise DataError("file b.csv, row 3: no number")
        yield table(np.arange(100))

    order = Order(mode="none", rows=200)
    feed = StreamFeed(StreamTables([0, 1], broken), SCHEMA, "train", content="c", batch_rows=10, order=order)
    with pytest.raises(DataError, match="row 3"):
        list(islice(feed.batches(0), 20))


def test_process_forked_after_threads_read_can_read(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "storage"))
    manifest = write_dataset(storage, tmp_path / "scratch", 5)
    manifest.model_copy(update={"key": "d"}).write(storage)
    script = """
import os, sys, threading
from penstock import open_feed
def read():
    for _ in range(3):
        assert sum(batch.rows for batch in open_feed(sys.argv[1], batch_rows=512).batches(0)) == int(sys.argv[2])
threads = [threading.Thread(target=read) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
for _ in range(3):
    if not (child := os.fork()):
        read()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print("read")
"""
    arguments = [f"{tmp_path}/storage/datasets/d", str(ROWS)]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "4", "HOME": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        try:
            assert program.communicate(timeout=90)[0] == "read\n"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
