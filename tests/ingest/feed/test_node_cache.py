"""The node's cache of shards: fetched once, bounded, shared by processes that are killed, never pulled from under a reader."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from penstock.digest import file_digest
from penstock.errors import DataError, PreflightError, ServiceError, SpecError
from penstock.ingest.feed.cached import open_cached_feed
from penstock.ingest.feed.mapped_shards import FETCH_THREADS
from penstock.ingest.feed.node_cache import NodeCache
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.shuffle.order import Order, ShardRows
from penstock.storage import Storage
from tests import ROOT
from tests.conformance.feed_cases import ROWS, check_values, order_of, write_dataset


def test_processes_of_one_node_fetch_a_shard_once(remote: Storage, manifest: DatasetManifest, tmp_path: Path) -> None:
    script = """
import sys, time
from pathlib import Path
from penstock.ingest.manifest import ShardInfo
from penstock.ingest.feed.node_cache import NodeCache
from penstock.storage import Storage
get_file = Storage.get_file
def slow(self, path, local):
    with open(sys.argv[3], "a") as log:
        log.write(path + "\\n")
    get_file(self, path, local)
    time.sleep(0.3)  # the others find it under way; without this the test would still hold, and see less
Storage.get_file = slow
shard = ShardInfo.model_validate_json(sys.argv[2])
path = NodeCache(Path(sys.argv[4])).hold(Storage(sys.argv[1]), shard).path
assert path.stat().st_size == shard.size_bytes
"""
    arguments = [remote.root, manifest.shards[0].model_dump_json(), str(tmp_path / "log"), str(tmp_path / "shared")]
    running = [subprocess.Popen([sys.executable, "-c", script, *arguments], env={"PYTHONPATH": str(ROOT)}) for _ in range(4)]
    assert [process.wait() for process in running] == [0, 0, 0, 0]
    assert (tmp_path / "log").read_text().splitlines() == [manifest.shards[0].path]


def test_a_download_damaged_once_is_repeated(
    remote: Storage, manifest: DatasetManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_file = Storage.get_file
    tries: list[str] = []

    def damaged_first(self: Storage, path: str, local: Path) -> None:
        get_file(self, path, local)
        tries.append(path)
        if len(tries) == 1:
            data = bytearray(local.read_bytes())
            data[len(data) // 2] ^= 1
            local.write_bytes(data)

    monkeypatch.setattr(Storage, "get_file", damaged_first)
    path = NodeCache(tmp_path / "cache").hold(remote, manifest.shards[0]).path
    assert len(tries) == 2
    assert path.read_bytes() == remote.read_bytes(manifest.shards[0].path)


def test_damaged_remote_shard_is_refused_without_leftovers(remote: Storage, manifest: DatasetManifest, tmp_path: Path) -> None:
    shard = manifest.shards[0]
    data = bytearray(remote.read_bytes(shard.path))
    data[-100] ^= 1
    remote.write_bytes(shard.path, bytes(data))
    remote.write_bytes(f"units/{shard.unit}/unit.json", b"{}")
    with pytest.raises(DataError, match=f"{shard.path} has another content"):
        NodeCache(tmp_path / "cache").hold(remote, shard)
    assert not remote.exists(f"units/{shard.unit}/unit.json"), "the next run is to make its unit again"
    remote.write_bytes(shard.path, bytes(data[:-1]))
    with pytest.raises(DataError, match="bytes; its manifest lists"):
        NodeCache(tmp_path / "cache").hold(remote, shard)
    remote.delete(shard.path)
    with pytest.raises(DataError, match="missing"):
        NodeCache(tmp_path / "cache").hold(remote, shard)
    assert {path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()} == {".lock", ""}, "locks and the record"


def test_unreachable_storage_is_a_service_error(
    remote: Storage, manifest: DatasetManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: LocalFileSystem, *_: str) -> None:
        raise ConnectionRefusedError("nobody there")

    monkeypatch.setattr(LocalFileSystem, "get_file", refuse)
    with pytest.raises(ServiceError, match="nobody there"):
        NodeCache(tmp_path / "cache").hold(remote, manifest.shards[0])


def test_a_torn_file_in_the_cache_is_fetched_again(remote: Storage, manifest: DatasetManifest, tmp_path: Path) -> None:
    path = NodeCache(tmp_path / "cache").hold(remote, manifest.shards[0]).path
    path.write_bytes(b"short")
    assert NodeCache(tmp_path / "cache").hold(remote, manifest.shards[0]).path.stat().st_size == manifest.shards[0].size_bytes


def test_shard_changed_in_the_cache_is_fetched_again(remote: Storage, manifest: DatasetManifest, tmp_path: Path) -> None:
    shard = manifest.shards[0]
    path = NodeCache(tmp_path / "cache").hold(remote, shard).path
    whole, damaged = path.read_bytes(), bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    assert NodeCache(tmp_path / "cache").hold(remote, shard).path.read_bytes() == whole


def test_room_is_found_without_a_search_for_each_shard(
    remote: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[str] = []
    glob = Path.glob

    def counted(folder: Path, pattern: str) -> Any:
        searched.append(pattern)
        return glob(folder, pattern)

    monkeypatch.setattr(Path, "glob", counted)
    shards = write_dataset(remote, tmp_path / "many", 30).shards
    roomy = NodeCache(tmp_path / "roomy", sum(shard.size_bytes for shard in shards))
    for shard in shards:
        roomy.hold(remote, shard)
    assert searched.count("*/*.arrow") == 1
    assert len(cached(roomy.folder)) == len(shards)


def cached(folder: Path) -> set[str]:
    return {path.stem for path in folder.rglob("*.arrow")}


def digests(manifest: DatasetManifest) -> list[str]:
    return [shard.digest for shard in manifest.shards]


def test_least_recently_used_shards_are_evicted(remote: Storage, manifest: DatasetManifest, tmp_path: Path) -> None:
    first, second, third, _ = manifest.shards
    cache = NodeCache(tmp_path / "small", budget_bytes=first.size_bytes + second.size_bytes + third.size_bytes)
    for shard in (first, second, third):
        cache.hold(remote, shard)
    for age, shard in enumerate((second, first, third)):  # first was used after second
        os.utime(cache.folder / shard.digest[:2] / f"{shard.digest}.lock", (1000 + age, 1000 + age))
    small = write_dataset(remote, tmp_path / "scratch2", 40).shards[0]
    cache.hold(remote, small)
    assert cached(cache.folder) == {first.digest, third.digest, small.digest}


def test_mapped_shards_are_not_evicted_and_overflow_is_refused(
    remote: Storage, manifest: DatasetManifest, tmp_path: Path
) -> None:
    first, second, third, fourth = manifest.shards
    cache = NodeCache(tmp_path / "small", budget_bytes=first.size_bytes + second.size_bytes + fourth.size_bytes)
    held = [cache.hold(remote, first), cache.hold(remote, second)]
    cache.hold(remote, third)  # not kept: the next one takes its place
    held.append(cache.hold(remote, fourth))
    assert cached(cache.folder) == {first.digest, second.digest, fourth.digest}
    with pytest.raises(PreflightError, match="has no room for a shard") as refused:
        cache.hold(remote, third)
    assert "PENSTOCK_CACHE_BYTES" in refused.value.next_step
    assert all(file_digest(one.path) in digests(manifest) for one in held)
    del held
    cache.hold(remote, third)


def test_leftovers_of_killed_fetch_are_removed(remote: Storage, manifest: DatasetManifest, tmp_path: Path) -> None:
    script = """
import sys, time
from pathlib import Path
from penstock.ingest.manifest import ShardInfo
from penstock.ingest.feed.node_cache import NodeCache
from penstock.storage import Storage
def stuck(self, path, local):
    Path(local).write_bytes(b"half")
    print("fetching", flush=True)
    time.sleep(600)  # until it is killed
Storage.get_file = stuck
NodeCache(Path(sys.argv[3])).hold(Storage(sys.argv[1]), ShardInfo.model_validate_json(sys.argv[2]))
"""
    shard, other = manifest.shards[:2]
    cache = NodeCache(tmp_path / "cache")
    child = subprocess.Popen(
        [sys.executable, "-c", script, remote.root, shard.model_dump_json(), str(cache.folder)],
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stdout.readline() == b"fetching\n"
    cache.hold(remote, other)
    assert len(list(cache.folder.rglob("*.part"))) == 1, "a fetch that goes on is left alone"
    child.kill()
    child.communicate()
    cache.hold(remote, shard)
    assert not list(cache.folder.rglob("*.part"))
    assert cached(cache.folder) == {shard.digest, other.digest}


def test_full_disk_is_reported(
    remote: Storage, manifest: DatasetManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: LocalFileSystem, *_: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalFileSystem, "get_file", full)
    with pytest.raises(PreflightError, match="has no room"):
        NodeCache(tmp_path / "cache").hold(remote, manifest.shards[0])
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_unwritable_cache_is_named(remote: Storage, manifest: DatasetManifest, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    with pytest.raises(PreflightError, match=r"taken cannot store local:.*\.arrow: .*Not a directory"):
        NodeCache(tmp_path / "taken", 10**9).hold(remote, manifest.shards[0])


def test_running_fetches_count_as_used_disk(remote: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_dataset(remote, tmp_path / "many", 30)
    size = max(shard.size_bytes for shard in manifest.shards)
    disk = SimpleNamespace(total=20 * size, free=12 * size)  # a tenth of it stays free: ten of them may come
    monkeypatch.setattr("penstock.ingest.feed.node_cache.shutil.disk_usage", lambda _: disk)
    cache, held = NodeCache(tmp_path / "cache"), []
    with pytest.raises(PreflightError, match="has no room"):
        for shard in manifest.shards:
            cache.folder.mkdir(exist_ok=True)
            held.append(cache._reserve(shard.model_copy(update={"size_bytes": size})))
    assert len(held) == 10


def test_half_of_a_nearly_full_disk_is_used(remote: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shard, *_) = write_dataset(remote, tmp_path / "d", 2).shards
    disk = SimpleNamespace(total=1000 * shard.size_bytes, free=4 * shard.size_bytes)  # less than a tenth of it
    monkeypatch.setattr("penstock.ingest.feed.node_cache.shutil.disk_usage", lambda _: disk)
    cache = NodeCache(tmp_path / "cache")
    cache.hold(remote, shard)
    disk.free -= shard.size_bytes  # what the cache holds changes nothing of what it may
    assert cache.budget_bytes == 2 * shard.size_bytes


def test_ending_program_does_not_wait_for_whole_dataset(remote: Storage, tmp_path: Path) -> None:
    manifest = write_dataset(remote, tmp_path / "many", 60)
    manifest.write(Storage(remote.root.removeprefix("local://")))
    (tmp_path / "manifest.json").write_text(manifest.model_dump_json())
    script = """
import sys, threading
from pathlib import Path
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.feed.cached import open_cached_feed
from penstock.ingest.shuffle.order import Order
from penstock.storage import Storage
get_file, ends = Storage.get_file, threading.Event()
def slow(self, path, local):
    print(path, flush=True)
    ends.wait()
    get_file(self, path, local)
Storage.get_file = slow
manifest = DatasetManifest.model_validate_json(Path(sys.argv[2]).read_text()).opened(Storage(sys.argv[1]))
order = Order(mode="global", seed=3, rows=manifest.rows["train"])
feed = open_cached_feed([(Storage(sys.argv[1]), manifest)], "train", batch_rows=1, order=order)
threading._register_atexit(ends.set)  # the last one that is registered is called first
raise SystemExit(3)
"""
    arguments = [remote.root, str(tmp_path / "manifest.json")]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={"PYTHONPATH": str(ROOT), "PENSTOCK_CACHE_DIR": str(tmp_path / "new")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 3, done.stderr
    assert 1 <= len(done.stdout.split()) <= FETCH_THREADS < len(manifest.shards)


def test_more_shards_than_open_files_are_refused_at_once(remote: Storage, tmp_path: Path) -> None:
    manifest = write_dataset(remote, tmp_path / "many", 80)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    script = """
import resource, sys
from pathlib import Path
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.feed.cached import open_cached_feed
from penstock.ingest.shuffle.order import Order
from penstock.errors import PreflightError
from penstock.storage import Storage
manifest = DatasetManifest.model_validate_json(Path(sys.argv[2]).read_text()).opened(Storage(sys.argv[1]))
order = Order(mode="global", seed=3, rows=manifest.rows["train"])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1024))
seen = sum(b.rows for b in open_cached_feed([(Storage(sys.argv[1]), manifest)], "train", batch_rows=10, order=order).batches(0))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    open_cached_feed([(Storage(sys.argv[1]), manifest)], "train", batch_rows=10, order=order)
except PreflightError as error:
    print(seen, error)
"""
    manifest.write(Storage(remote.root.removeprefix("local://")))
    (tmp_path / "manifest.json").write_text(manifest.model_dump_json())
    arguments = [remote.root, str(tmp_path / "manifest.json")]
    environment = {"PYTHONPATH": str(ROOT), "PENSTOCK_CACHE_DIR": str(tmp_path / "new")}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert f"{ROWS} shuffle.mode: global keeps {len(manifest.shards)} shards open" in done.stdout, done.stdout + done.stderr
    assert len(manifest.shards) > 64 and resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_the_budget_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_BYTES", "2GB")
    assert NodeCache(tmp_path).budget_bytes == 2_000_000_000
    monkeypatch.setenv("PENSTOCK_CACHE_BYTES", "much")
    with pytest.raises(SpecError, match="PENSTOCK_CACHE_BYTES='much'"):
        NodeCache(tmp_path)
    monkeypatch.delenv("PENSTOCK_CACHE_BYTES")
    assert NodeCache(tmp_path).budget_bytes > 0


@pytest.mark.parametrize("mode", ["windowed", "none"])
def test_windowed_order_reads_dataset_larger_than_cache(
    remote: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    manifest = write_dataset(remote, tmp_path / "many", 40)
    budget = sum(shard.size_bytes for shard in manifest.shards) // 2
    monkeypatch.setenv("PENSTOCK_CACHE_BYTES", str(budget))
    order = order_of("global", 3)
    with pytest.raises(PreflightError, match=r"shuffle\.mode: global needs all"):
        open_cached_feed([(remote, manifest)], "train", batch_rows=1, order=order)
    if mode == "windowed":
        shards = tuple(shard.rows for shard in manifest.shards)
        order = Order(mode="windowed", seed=3, rows=ROWS, window_rows=60, shards=ShardRows.of(shards))
    else:
        order = order_of("none", 0)
    seen: list[int] = []
    for epoch in range(2):
        for batch in open_cached_feed([(remote, manifest)], "train", batch_rows=1, order=order).batches(epoch):
            check_values(batch)
            seen += batch.row_ids.tolist()
            with open(tmp_path / "cache" / "room.lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # while it is held, nothing is evicted to make room for something else
                assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.arrow")) <= budget
    assert sorted(seen) == sorted([*range(ROWS)] * 2)


def test_two_runs_share_a_small_cache(remote: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_dataset(remote, tmp_path / "many", 40)
    monkeypatch.setenv("PENSTOCK_CACHE_BYTES", str(12 * max(shard.size_bytes for shard in manifest.shards)))
    shards = tuple(shard.rows for shard in manifest.shards)
    orders = [
        Order(mode="windowed", seed=seed, rows=ROWS, window_rows=ROWS // 5, shards=ShardRows.of(shards)) for seed in (1, 2)
    ]
    feeds = [open_cached_feed([(remote, manifest)], "train", batch_rows=16, order=order) for order in orders]
    seen: list[list[int]] = [[], []]
    for batches in zip(*(feed.batches(0) for feed in feeds), strict=True):
        for batch, rows in zip(batches, seen, strict=True):
            check_values(batch)
            rows += batch.row_ids.tolist()
    assert [sorted(rows) for rows in seen] == [list(range(ROWS))] * 2


def test_validation_is_read_while_train_fills_cache(remote: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = write_dataset(remote, tmp_path / "train", 10)
    (tmp_path / "storage" / "beside" / "units" / "u").mkdir(parents=True)
    beside = remote.child("beside")
    held_out = write_dataset(beside, tmp_path / "validation", 40)  # the same rows in smaller shards: other files
    needed = sum(shard.size_bytes for shard in train.shards) + 6 * max(shard.size_bytes for shard in train.shards)
    monkeypatch.setenv("PENSTOCK_CACHE_BYTES", str(needed - 1))
    with pytest.raises(PreflightError, match="and some more shards"):
        open_cached_feed([(remote, train)], "train", batch_rows=10, order=order_of("global", 3))
    monkeypatch.setenv("PENSTOCK_CACHE_BYTES", str(needed))
    training = open_cached_feed([(remote, train)], "train", batch_rows=1, order=order_of("global", 3))
    validation = open_cached_feed([(beside, held_out)], "train", batch_rows=1, order=order_of("none", 0))
    for epoch in range(2):
        for feed in (training, validation):
            assert sorted(row for batch in feed.batches(epoch) for row in batch.row_ids.tolist()) == list(range(ROWS))


def test_training_starts_before_the_dataset_has_arrived(
    remote: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_dataset(remote, tmp_path / "many", 30)
    get_file, opened = Storage.get_file, threading.Event()
    late = {shard.path for shard in manifest.shards[15:]}

    def slow(self: Storage, path: str, local: Path) -> None:
        if path in late:
            assert opened.wait(60), "a late shard was waited for before the first batch was given out"
        get_file(self, path, local)

    monkeypatch.setattr(Storage, "get_file", slow)
    batches = open_cached_feed([(remote, manifest)], "train", batch_rows=1, order=order_of("none", 0)).batches(0)
    check_values(next(batches))
    opened.set()
    assert sum(batch.rows for batch in batches) == ROWS - 1


@pytest.mark.drill
def test_killed_processes_leave_only_whole_shards(remote: Storage, tmp_path: Path) -> None:
    manifest = write_dataset(remote, tmp_path / "many", 30)
    script = """
import random, sys
from pathlib import Path
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.feed.node_cache import NodeCache
from penstock.digest import file_digest
from penstock.storage import Storage
manifest = DatasetManifest.model_validate_json(Path(sys.argv[2]).read_text()).opened(Storage(sys.argv[1]))
cache, pick = NodeCache(Path(sys.argv[3]), int(sys.argv[4])), random.Random(int(sys.argv[5]))
while True:
    held = [cache.hold(Storage(sys.argv[1]), shard) for shard in pick.sample(manifest.shards, 2)]
    for one in held:
        assert file_digest(one.path) == one.path.stem
    del held, one
    print("ok", flush=True)
"""
    manifest.write(Storage(remote.root.removeprefix("local://")))
    (tmp_path / "manifest.json").write_text(manifest.model_dump_json())
    folder, budget = tmp_path / "tight", 10 * max(shard.size_bytes for shard in manifest.shards)
    assert budget < sum(shard.size_bytes for shard in manifest.shards)

    def start(seed: int) -> subprocess.Popen[bytes]:
        arguments = [remote.root, str(tmp_path / "manifest.json"), str(folder), str(budget), str(seed)]
        return subprocess.Popen(
            [sys.executable, "-c", script, *arguments], env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
        )

    pick, running = random.Random(7), [start(seed) for seed in range(3)]
    for kill in range(12):
        victim = pick.randrange(3)
        out = running[victim].stdout
        assert out is not None
        for _ in range(pick.randrange(1, 20)):
            assert out.readline() == b"ok\n", "a reader failed"
        time.sleep(pick.random() * 0.01)  # anywhere in the next fetch
        running[victim].send_signal(signal.SIGKILL)
        running[victim].communicate()
        running[victim] = start(100 + kill)
    for process in running:
        assert process.poll() is None
        process.kill()
        process.communicate()
    for path in folder.rglob("*.arrow"):
        assert file_digest(path) == path.stem
    cache = NodeCache(folder, budget)
    cache.hold(remote, manifest.shards[-1])
    NodeCache(folder, 0)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= budget
