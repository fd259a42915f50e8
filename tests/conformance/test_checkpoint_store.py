"""Does a checkpoint count exactly when it is whole? The same questions to a local disk and to an object store."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import safetensors
import torch

from penstock.digest import bytes_digest
from penstock.errors import CheckpointError, LeaseHeldError, ServiceError, TrainingError
from penstock.storage import Storage
from penstock.training.checkpoint.fence import Writer
from penstock.training.checkpoint.journal import read_journal, seal_points
from penstock.training.checkpoint.manifest import VERSION, Checkpoint, CheckpointFacts
from penstock.training.checkpoint.packed import pack
from penstock.training.checkpoint.state_files import (
    NamedTensors,
    torch_snapshot,
    training_file,
    training_of,
    weights_digest,
    weights_of,
)
from penstock.training.checkpoint.store import CheckpointStore, SavedBytes, Snapshot
from penstock.training.checkpoint.writer import CheckpointWriter
from penstock.training.events import CheckpointCommitted, Event, Point, Warned
from penstock.training.spec import BestSpec, CheckpointSpec
from tests import ROOT


@pytest.fixture(params=["disk", "object store", pytest.param("S3 server", marks=pytest.mark.s3)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "S3 server":
        return Storage(f"{request.getfixturevalue('s3_bucket')}/run")
    return Storage(str(tmp_path)) if request.param == "disk" else Storage(f"memory://{uuid.uuid4().hex}")


WITHOUT_SERVER = pytest.mark.parametrize("storage", ["disk", "object store"], indirect=True)
"""For choices that penstock makes among checkpoints, whatever store they are in."""


def snapshot(step: int, *, value: float | None = None, metrics: dict[str, float | None] | None = None) -> Snapshot:
    fill = float(step) if value is None else value
    facts = CheckpointFacts(step=step, epoch=1, position=step * 8, world_size=2, identity={"data": "d"}, metrics=metrics or {})
    half = torch.full((3,), fill, dtype=torch.bfloat16)
    model = {"weight": torch.full((64, 64), fill), "half": half, "count": torch.tensor(step), "none": torch.zeros(0, 4)}
    training = pack({"optimizer": {"state": {0: {"step": torch.tensor(fill)}}}, "extra": {}})
    return torch_snapshot(facts, model, training_file(training, torch.get_rng_state().expand(2, -1)))


def test_model_of_one_file_is_saved(storage: Storage) -> None:
    store, model = CheckpointStore(storage), b"1.5 2.5"
    facts = CheckpointFacts(step=3, epoch=1, position=0, world_size=1)
    store.write(Snapshot(facts, {"weights.txt": SavedBytes(model)}, lambda: bytes_digest(model)))
    read = newest(store)
    assert read.storage.read_bytes("weights.txt") == model and read.manifest.weights_digest == bytes_digest(model)
    for name in ("manifest.json", "model.json"):
        with pytest.raises(CheckpointError, match=f"'{name}', which is penstock's own name"):
            store.write(Snapshot(facts, {name: SavedBytes(model)}, str))


def overwrite(storage: Storage, path: str, data: bytes) -> None:
    storage.child("checkpoints").write_bytes(path, data)


def newest(store: CheckpointStore) -> Checkpoint:
    checkpoint, warnings = store.newest_valid()
    assert checkpoint is not None and warnings == []
    return checkpoint


def test_empty_run_has_no_checkpoint(storage: Storage) -> None:
    assert CheckpointStore(storage).newest_valid() == (None, [])
    assert CheckpointStore(storage).best() is None


def test_written_checkpoint_is_read_back(storage: Storage) -> None:
    store = CheckpointStore(storage)
    written = store.write(snapshot(7, metrics={"val/loss": 0.25, "train/loss": None}))
    read = newest(CheckpointStore(storage))
    assert read.name == written.name and read.manifest == written.manifest
    assert (read.state.step, read.state.epoch, read.state.position) == (7, 1, 56)
    assert read.manifest.metrics == {"val/loss": 0.25, "train/loss": None}
    assert torch.equal(weights_of(read.storage)["half"], torch.full((3,), 7.0, dtype=torch.bfloat16))
    assert weights_digest(weights_of(read.storage)) == read.manifest.weights_digest
    kept = training_of(read.storage)
    assert kept["optimizer"]["state"][0]["step"].item() == 7.0
    assert kept["ranks"].equal(torch.get_rng_state().expand(2, -1))
    assert store.problem(read.name) is None
    assert store.get(read.name).manifest == read.manifest


def test_files_without_manifest_do_not_count(storage: Storage) -> None:
    store = CheckpointStore(storage)
    first = store.write(snapshot(1))

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.write(snapshot(2), before_commit=die)
    assert newest(store).name == first.name
    assert len(storage.list("checkpoints")) == 2
    store.clean(first)
    assert storage.list("checkpoints") == [first.name]


@pytest.mark.parametrize("file", ["model.safetensors", "training.safetensors", "manifest.json"])
def test_torn_checkpoint_is_skipped_with_a_warning(storage: Storage, file: str) -> None:
    store = CheckpointStore(storage)
    first = store.write(snapshot(100))
    torn = store.write(snapshot(140))
    content = storage.read_bytes(f"checkpoints/{torn.name}/{file}")
    overwrite(storage, f"{torn.name}/{file}", content[: len(content) // 2])
    found, warnings = store.newest_valid()
    assert found is not None and found.name == first.name
    assert len(warnings) == 1
    assert torn.name in warnings[0] and file in warnings[0] and "40 steps are trained again" in warnings[0]
    assert store.problem(torn.name) is not None
    store.clean(found)
    assert [checkpoint.name for checkpoint in store.committed()] == [first.name]


@WITHOUT_SERVER
def test_one_flipped_bit_is_noticed(storage: Storage) -> None:
    store = CheckpointStore(storage)
    store.write(snapshot(1))
    bad = store.write(snapshot(2))
    content = bytearray(storage.read_bytes(f"checkpoints/{bad.name}/model.safetensors"))
    content[-5] ^= 1
    overwrite(storage, f"{bad.name}/model.safetensors", bytes(content))
    found, warnings = store.newest_valid()
    assert found is not None and found.manifest.step == 1
    assert "hash" in warnings[0]


@WITHOUT_SERVER
def test_a_missing_file_is_noticed(storage: Storage) -> None:
    store = CheckpointStore(storage)
    store.write(snapshot(1))
    bad = store.write(snapshot(2))
    storage.delete(f"checkpoints/{bad.name}/training.safetensors")
    found, warnings = store.newest_valid()
    assert found is not None and found.manifest.step == 1
    assert "training.safetensors is missing" in warnings[0]


@WITHOUT_SERVER
def test_run_without_valid_checkpoint_is_refused(storage: Storage) -> None:
    store = CheckpointStore(storage)
    for step in (1, 2):
        storage.delete(f"checkpoints/{store.write(snapshot(step)).name}/model.safetensors")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints") as caught:
        store.newest_valid()
    assert len(caught.value.problems) == 2 and "--fresh" in str(caught.value)


@WITHOUT_SERVER
@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_other_manifest_version_is_refused(storage: Storage, version: int) -> None:
    store = CheckpointStore(storage)
    store.write(snapshot(1))
    other = store.write(snapshot(2))
    text = storage.read_bytes(f"checkpoints/{other.name}/manifest.json")
    overwrite(storage, f"{other.name}/manifest.json", text.replace(b'"version": %d' % VERSION, b'"version": %d' % version))
    with pytest.raises(CheckpointError, match=rf"version {version}.*reads version {VERSION}") as told:
        store.newest_valid()
    assert told.value.next_step.startswith("run with the penstock that wrote it, or start over")
    assert len(storage.list("checkpoints")) == 2


@WITHOUT_SERVER
def test_newest_and_best_are_kept_later_of_equals(storage: Storage) -> None:
    store = CheckpointStore(storage, CheckpointSpec(keep=2, best=BestSpec(metric="val/accuracy", mode="max")))
    for step, accuracy in enumerate([0.5, 0.9, 0.9, 0.7, None, 0.6], start=1):
        store.write(snapshot(step, metrics={"val/accuracy": accuracy}))
        store.prune()
    assert sorted(checkpoint.manifest.step for checkpoint in store.committed()) == [3, 5, 6]
    best = store.best()
    assert best is not None and best.manifest.step == 3
    assert len(storage.list("checkpoints")) == 3


def test_several_best_are_kept_and_with_keep_0_none_besides(storage: Storage) -> None:
    store = CheckpointStore(storage, CheckpointSpec(keep=0, best=BestSpec(metric="val/loss"), keep_best=2))
    for step, loss in enumerate([0.5, 0.1, 0.2, 0.9, 0.3], start=1):
        store.write(snapshot(step, metrics={"val/loss": loss}))
        store.prune()
    assert [checkpoint.manifest.step for checkpoint in store.committed()] == [5, 3, 2]
    assert len(store.prune(ended=True)) == 1
    assert [checkpoint.manifest.step for checkpoint in store.committed()] == [3, 2]
    without_best = CheckpointStore(storage, CheckpointSpec(keep=0))
    without_best.prune(ended=True)
    assert [checkpoint.manifest.step for checkpoint in without_best.committed()] == [3]


@WITHOUT_SERVER
def test_checkpoint_without_metric_is_never_best(storage: Storage) -> None:
    store = CheckpointStore(storage, CheckpointSpec(keep=1, best=BestSpec(metric="val/loss")))
    store.write(snapshot(1, metrics={"train/loss": 0.0}))
    store.write(snapshot(2, metrics={"val/loss": None}))
    assert store.best() is None


def test_repeated_step_keeps_the_older_checkpoint(storage: Storage) -> None:
    store = CheckpointStore(storage)
    first = store.write(snapshot(5, value=1.0))
    time.sleep(0.002)  # manifests carry milliseconds
    again = store.write(snapshot(5, value=2.0))
    assert first.name != again.name
    assert newest(store).name == again.name
    storage.delete(f"checkpoints/{again.name}/model.safetensors")
    found, warnings = store.newest_valid()
    assert found is not None and found.name == first.name and "no step is lost" in warnings[0]
    store.clean(found)
    assert [checkpoint.name for checkpoint in store.committed()] == [first.name]


@WITHOUT_SERVER
def test_unknown_checkpoint_is_refused_with_known_ones(storage: Storage) -> None:
    store = CheckpointStore(storage)
    known = store.write(snapshot(1))
    with pytest.raises(CheckpointError, match=known.name):
        store.get("step-0000000009-abcdef")


def test_place_that_fails_leaves_no_files_of_its_own(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)
    store, name = CheckpointStore(storage), CheckpointStore.new_name(1)
    store.place(name, {"folder/of another rank": tmp_path / "a"})
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        store.place(name, {"folder/a": tmp_path / "a", "folder/b": tmp_path})
    assert [*storage.tree(f"checkpoints/{name}")] == [f"checkpoints/{name}/folder/of another rank"]


def test_refusing_disk_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where a folder must be")
    store = CheckpointStore(Storage(str(tmp_path)))
    with pytest.raises(CheckpointError, match="cannot write checkpoint") as told:
        store.write(snapshot(1))
    assert "free space or restore access" in told.value.next_step
    (tmp_path / "checkpoints").unlink()
    assert store.write(snapshot(2)).name == newest(store).name


def test_file_in_place_of_checkpoints_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("put here by hand")
    with pytest.raises(CheckpointError, match="checkpoints is a file") as told:
        CheckpointStore(Storage(str(tmp_path))).newest_valid()
    assert "put the folder back" in told.value.next_step


_WRITERS = """
import os, sys, torch
from penstock.storage import Storage
from penstock.training.checkpoint.manifest import CheckpointFacts
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.checkpoint.packed import pack
from penstock.training.checkpoint.state_files import torch_snapshot, training_file
from penstock.training.spec import CheckpointSpec
while sys.stdin.readline():
    if not (child := os.fork()):
        break
    print(child, flush=True)
    os.waitpid(child, 0)
    print("over", flush=True)
else:
    sys.exit()
store = CheckpointStore(Storage(sys.argv[1]), CheckpointSpec(keep=2))
found, _ = store.newest_valid()
store.clean(found)
step = found.manifest.step if found else 0
while True:
    step += 1
    facts = CheckpointFacts(step=step, epoch=0, position=step, world_size=1)
    model = {f"w{i}": torch.full((50_000,), float(step)) for i in range(4)}
    store.write(torch_snapshot(facts, model, training_file(pack({"extra": {}}), torch.zeros(1, 9, dtype=torch.uint8))))
    store.prune()
    print(step, flush=True)
"""
"""Forks a writer for each line that it is sent, so that torch is imported once."""


@pytest.mark.drill
def test_killed_writer_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(5)
    store = CheckpointStore(Storage(str(tmp_path)), CheckpointSpec(keep=2))
    reached = 0
    command, environment = [sys.executable, "-c", _WRITERS, str(tmp_path)], {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as writers:
        assert writers.stdin is not None and writers.stdout is not None
        for _ in range(6):
            writers.stdin.write("\n")
            writers.stdin.flush()
            writer, reported = int(writers.stdout.readline()), int(writers.stdout.readline())
            time.sleep(rng.uniform(0.0, 0.05))  # somewhere within a write, a prune, or between them
            os.kill(writer, signal.SIGKILL)
            reported = max([reported, *map(int, iter(writers.stdout.readline, "over\n"))])
            found, warnings = store.newest_valid()
            assert found is not None and warnings == []
            assert found.manifest.step in (reported, reported + 1) and reported > reached
            assert torch.equal(weights_of(found.storage)["w3"], torch.full((50_000,), float(found.manifest.step)))
            reached = found.manifest.step


def test_missing_checkpoint_is_a_problem(storage: Storage) -> None:
    store = CheckpointStore(storage)
    name = store.write(snapshot(7)).name
    assert store.problem(name) is None
    storage.delete(f"checkpoints/{name}")
    assert store.problem(name) == "manifest.json is missing"


def test_write_on_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("penstock.training.checkpoint.state_files.safetensors.torch.save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device") as refused:
        CheckpointStore(Storage(str(tmp_path))).write(snapshot(7))
    assert "free space" in refused.value.next_step
    assert not any((tmp_path / "checkpoints").iterdir())


def test_damaged_record_of_a_writer_is_named(tmp_path: Path) -> None:
    CheckpointStore(Storage(str(tmp_path))).take_over(Writer(3))
    (tmp_path / "writers/a3-r0.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"writers/a3-r0.json is damaged") as refused:
        CheckpointStore(Storage(str(tmp_path))).committed()
    assert "delete it to continue from one of these" in refused.value.next_step


def test_writer_seals_points_prunes_and_posts_events(storage: Storage) -> None:
    points = [Point(1000 + step, step, {"train/loss": 1 / step}) for step in (1, 2)]
    news: list[Event] = []
    store = CheckpointStore(storage, CheckpointSpec(keep=2))
    with closing(CheckpointWriter(store, storage, news.append)) as writer:
        for step in (1, 2, 3):
            writer.submit(lambda step=step: snapshot(step), points if step == 2 else [])  # type: ignore[misc]
        name = writer.wait()
    assert [checkpoint.manifest.step for checkpoint in store.committed()] == [3, 2]
    assert newest(store).name == name
    assert read_journal(storage, 3) == points
    assert [event.step for event in news if isinstance(event, CheckpointCommitted)] == [1, 2, 3]


@WITHOUT_SERVER
def test_undeletable_checkpoint_warns_once_and_goes_later(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    news: list[Event] = []
    store = CheckpointStore(storage, CheckpointSpec(keep=1))
    refusals = iter(["503", "503"])
    delete = Storage.delete

    def delete_when_the_store_is_well(own: Storage, path: str) -> None:
        if (refusal := next(refusals, None)) is not None:
            raise ServiceError(refusal)
        delete(own, path)

    monkeypatch.setattr(Storage, "delete", delete_when_the_store_is_well)
    with closing(CheckpointWriter(store, storage, news.append)) as writer:
        for step in (1, 2, 3, 4):
            writer.submit(lambda step=step: snapshot(step), [])  # type: ignore[misc]
        writer.wait()
    assert [checkpoint.manifest.step for checkpoint in store.committed()] == [4]
    assert [event.step for event in news if isinstance(event, CheckpointCommitted)] == [1, 2, 3, 4]
    (warned,) = [event.message for event in news if isinstance(event, Warned)]
    assert warned == "an old checkpoint cannot be deleted (503); each later one tries it again"


@WITHOUT_SERVER
def test_nan_weights_are_not_written(storage: Storage) -> None:
    store = CheckpointStore(storage)
    bad = torch.tensor([1.0, math.nan])
    for tensor in (bad, bad.to(torch.float8_e4m3fn)):
        asked = partial(torch_snapshot, snapshot(1).facts, {"bad": tensor}, NamedTensors({}))
        writer = CheckpointWriter(store, storage, lambda event: None)
        with closing(writer):
            writer.submit(asked, [Point(1001, 1, {"train/loss": 1.0})])
            with pytest.raises(TrainingError, match="the weight bad is not a number after step 1"):
                writer.wait()
    assert storage.list("checkpoints") == [] and read_journal(storage, 1) == []


def test_replaced_rank_0_commits_nothing_and_late_write_is_ignored(storage: Storage) -> None:
    old, new = CheckpointStore(storage, CheckpointSpec(keep=1)), CheckpointStore(storage)
    old.take_over(Writer(1))
    common = old.write(snapshot(1))

    def replaced() -> None:  # after the look, before the manifest: it is on its way when the machine is cut off
        new.take_over(Writer(1, 1))

    late = old.write(snapshot(9), before_commit=replaced)
    assert newest(new).name == common.name
    mine = new.write(snapshot(2))

    for refused in (lambda: old.write(snapshot(10)), old.prune, lambda: old.clean(late), lambda: old.take_over(Writer(1))):
        with pytest.raises(LeaseHeldError, match=r"attempt 1, restart 0\) was replaced by another \(attempt 1, restart 1\)"):
            refused()
    reader = CheckpointStore(storage)
    assert [checkpoint.name for checkpoint in reader.committed()] == [mine.name, common.name]
    assert newest(reader).name == mine.name and reader.problem(common.name) is None
    assert sorted(storage.list("checkpoints")) == sorted([common.name, late.name, mine.name])
    new.clean(mine)
    assert sorted(storage.list("checkpoints")) == sorted([common.name, mine.name])

    third = CheckpointStore(storage)
    third.take_over(Writer(2))
    assert newest(third).name == mine.name


def test_replaced_rank_0_keeps_newer_segments(storage: Storage) -> None:
    for writer, value in ((Writer(1, 1), 1.0), (Writer(1), 0.0)):  # the older one comes back and seals the same step
        seal_points(storage, writer, 4, [Point(1004, 4, {"train/loss": value})])
    assert read_journal(storage, 4) == [Point(1004, 4, {"train/loss": 1.0})]
