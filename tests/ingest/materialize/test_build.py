"""The cached dataset: rows in order, units committed by themselves, damage repaired, and bad rows reported over all files."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import PIL
import pyarrow as pa
import pytest
from PIL import Image

from penstock.errors import DataError
from penstock.ingest.feed.node_cache import NodeCache
from penstock.ingest.manifest import DatasetManifest, manifest_path
from penstock.ingest.materialize.build import damaged_shards, materialize
from penstock.ingest.materialize.class_report import empty_splits, one_class
from penstock.ingest.materialize.unit import _image_libraries, _scratch
from penstock.ingest.preprocess.chain import BATCH_ROWS
from penstock.ingest.spec import MaterializeSpec
from penstock.progress import silent
from penstock.storage import Storage
from tests.ingest.preparing import ONE_FILE_PER_UNIT, Source, counting_code
from tests.ingest.reading import write_files


def part(start: int, rows: int = 10, **columns: Any) -> pa.Table:
    return pa.table({"x": np.arange(start, start + rows, dtype=np.float32), "y": np.arange(rows) % 3, **columns})


def parts(count: int) -> dict[str, Any]:
    return {f"train/part-{i:02d}.parquet": part(i * 10) for i in range(count)}


def counted(folder: Path, files: dict[str, Any], body: str = "pass", **data: Any) -> Source:
    """A source whose map_batches function leaves a line for every call."""
    folder.mkdir(exist_ok=True)
    step = {"map_batches": {"function": counting_code(folder, body), "params": {"log": str(folder / "calls")}}}
    return Source.of(folder, files, [step], label="y", **data)


def calls(folder: Path) -> list[int]:
    """First row of every batch that was prepared since the last look."""
    log = folder / "calls"
    lines = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    return sorted(int(line) for line in lines)


# The dataset.


def units(source: Source, manifest: DatasetManifest) -> list[dict[str, Any]]:
    """The commit records of the manifest's units."""
    found: list[dict[str, Any]] = [source.storage.read_json(f"units/{key}/unit.json") for key in manifest.shards.units]
    return found


def test_rows_keep_file_order_and_provenance(tmp_path: Path) -> None:
    source = Source.of(tmp_path, parts(3), label="y")
    manifest = source.materialize()
    assert manifest.rows == {"train": 30, "validation": 0, "test": 0}
    assert source.column(manifest, "x").tolist() == list(range(30))
    assert source.column(manifest, "_row").tolist() == [*range(10)] * 3
    assert [unit["files"] for unit in units(source, manifest)] == [[f"part-{i:02d}.parquet"] for i in range(3)]
    assert manifest.units == len(manifest.shards) == len(manifest.shards.units) == 3
    schema = manifest.feed_schema
    assert [(c.name, c.dtype, c.shape) for c in schema.columns] == [("x", "float32", ()), ("y", "int64", ())]
    assert (schema.label, schema.num_classes, schema.classes) == ("y", 3, None)
    assert manifest.extra["class_counts"] == {"train": {"0": 12, "1": 9, "2": 9}}


def test_stored_manifest_equals_returned_one(tmp_path: Path) -> None:
    source = Source.of(tmp_path, parts(2))
    manifest = source.materialize()
    assert DatasetManifest.model_validate(source.storage.read_json(manifest_path("key"))) == manifest


def test_every_row_goes_to_its_split_and_to_one_only(tmp_path: Path) -> None:
    files = {**parts(4), "test/a.parquet": part(100)}
    source = Source.of(tmp_path, files, validation={"fraction": 0.3}, test="test", label="y")
    manifest = source.materialize()
    train, held = (set(source.column(manifest, "x", split).tolist()) for split in ("train", "validation"))  # type: ignore[arg-type]
    assert train | held == set(range(40))
    assert not train & held
    assert 0 < len(held) < 40
    assert source.column(manifest, "x", "test").tolist() == list(range(100, 110))


def test_rows_do_not_depend_on_files_per_unit(tmp_path: Path) -> None:
    source = Source.of(tmp_path, parts(5), validation={"fraction": 0.3})
    apart = source.materialize()
    columns = {split: source.column(apart, "x", split).tolist() for split in ("train", "validation")}  # type: ignore[arg-type]
    together = source.materialize(spec=MaterializeSpec(unit_bytes=1 << 40))
    assert together.units < apart.units
    for split, expected in columns.items():
        assert source.column(together, "x", split).tolist() == expected  # type: ignore[arg-type]
    assert {0, 1} <= set(source.column(together, "_file").tolist())


def test_rows_do_not_depend_on_shard_size(tmp_path: Path) -> None:
    source = Source.of(tmp_path, {"train/a.parquet": part(0, rows=1000)})
    one = source.materialize()
    many = source.materialize(spec=MaterializeSpec(unit_bytes=1, shard_bytes=2400))
    assert [shard.rows for shard in many.shards] == [100] * 10
    assert len(one.shards) == 1
    assert source.column(many, "x").tolist() == list(range(1000))


def test_same_source_gives_same_bytes_and_digest(tmp_path: Path) -> None:
    first = Source.of(tmp_path / "a", parts(3), [{"min_max_scaler": {"columns": ["x"]}}]).materialize()
    second = Source.of(tmp_path / "b", parts(3), [{"min_max_scaler": {"columns": ["x"]}}]).materialize()
    assert first.content_digest == second.content_digest
    assert [s.digest for s in first.shards] == [s.digest for s in second.shards]
    changed = Source.of(tmp_path / "c", parts(3), [{"min_max_scaler": {"columns": ["y"]}}]).materialize()
    assert changed.content_digest != first.content_digest


def test_label_encoder_names_the_classes(tmp_path: Path) -> None:
    files = {"train/a.parquet": pa.table({"y": ["dog", "cat", "dog"]}), "test/a.parquet": pa.table({"y": ["cat"]})}
    manifest = Source.of(tmp_path, files, ["label_encoder"], test="test", label="y").materialize()
    assert (manifest.feed_schema.num_classes, manifest.feed_schema.classes) == (2, ("cat", "dog"))
    assert manifest.extra["class_counts"] == {"train": {"0": 1, "1": 2}, "test": {"0": 1}}


def test_renumbered_classes_have_no_names(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("def f(batch):\n    return {'y': batch['y'] + 10}\n")
    files = {"train/a.parquet": pa.table({"y": ["dog", "cat"]})}
    schema = Source.of(tmp_path, files, ["label_encoder", {"map_batches": "code.py:f"}], label="y").materialize().feed_schema
    assert (schema.num_classes, schema.classes) == (12, None)


def test_late_class_is_counted_and_named_with_its_row(tmp_path: Path) -> None:
    rows = BATCH_ROWS + 500  # a column of text is read in batches of that many
    labels = np.arange(rows) % 2
    table = pa.table({"y": labels, "c": ["a"] * rows})
    labels = np.where(np.arange(rows) >= rows - 3, 5, labels)
    files = {"train/a.parquet": table, "test/a.parquet": pa.table({"y": labels, "c": ["a"] * rows})}
    source = Source.of(tmp_path, files, [{"drop": ["c"]}], test="test", label="y")
    with pytest.raises(DataError, match=rf"3 rows have a label y .* first: .*test/a\.parquet, row {rows - 3} \(from 0\): 5"):
        source.materialize()
    counts = Source.of(tmp_path, {"train/a.parquet": files["test/a.parquet"]}, [{"drop": ["c"]}], label="y").materialize().extra
    assert counts["class_counts"] == {"train": {str(label): int((labels == label).sum()) for label in (0, 1, 5)}}


def test_a_streamed_table_holds_the_same_rows(tmp_path: Path) -> None:
    source = Source.of(tmp_path, parts(2), validation={"fraction": 0.4})
    manifest = source.materialize()
    tables = list(source.preparation().tables())
    assert all(table.column_names == ["x", "y"] for _, table in tables)
    streamed = [x for split, table in tables if split == "train" for x in table["x"].to_pylist()]
    assert streamed == source.column(manifest, "x").tolist()


# Work done once.


def test_a_second_run_does_no_work(tmp_path: Path) -> None:
    source = counted(tmp_path, parts(4))
    first = source.materialize()
    assert calls(tmp_path) == [0, 10, 20, 30]
    assert source.materialize() == first
    assert calls(tmp_path) == []


def test_adding_a_file_prepares_that_file_only(tmp_path: Path) -> None:
    source = counted(tmp_path, parts(4))
    before = source.materialize()
    calls(tmp_path)
    write_files(tmp_path, {"train/part-01b.parquet": part(500)})
    after = source.materialize()
    assert calls(tmp_path) == [500]
    assert {*before.shards.units} < {*after.shards.units}
    assert source.column(after, "x").tolist() == [*range(20), *range(500, 510), *range(20, 40)]


def test_datasets_made_at_once_share_units(tmp_path: Path) -> None:
    source = counted(tmp_path, parts(8))
    preparation, together = source.preparation(), threading.Barrier(2)

    def in_step(fn: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        for item in items:
            together.wait(timeout=60)
            yield fn(item)

    def make(key: str) -> DatasetManifest:
        given = {"preparation": preparation, "spec": ONE_FILE_PER_UNIT, "storage": source.storage, "progress": silent}
        return materialize(key=key, parallel=in_step, **given)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(make, ["a", "b"])
    assert one.content_digest == other.content_digest and one.shards.units == other.shards.units
    assert len(calls(tmp_path)) < 16 - 2, "most units are made once"


def test_large_units_are_started_first(tmp_path: Path) -> None:
    sizes = [10, 200, 12, 220, 1000]
    files = {f"train/part-{number}.parquet": part(number * 1000, rows) for number, rows in enumerate(sizes)}
    begun: list[int] = []

    def noting(fn: Callable[[Any], Any], jobs: Sequence[Any], *, num_cpus: float = 1) -> Iterator[Any]:
        begun.extend(job.rows for together in jobs for job in together)
        yield from map(fn, jobs)

    manifest = Source.of(tmp_path, files, label="y").materialize(parallel=noting)
    assert begun[0] == 1000 and sorted(begun[1:3]) == [200, 220] and sorted(begun[3:]) == [10, 12]
    assert [shard.rows for shard in manifest.shards] == sizes


def test_units_before_a_broken_one_are_committed(tmp_path: Path) -> None:
    source = Source.of(tmp_path, parts(16), label="y")
    tasks: list[list[str]] = []

    def noting(fn: Callable[[Any], Any], jobs: Sequence[Any], *, num_cpus: float = 1) -> Iterator[Any]:
        tasks.extend([job.files[0].name for job in together] for together in jobs)
        broken = Path(jobs[1][2].files[0].uri)
        content = broken.read_bytes()
        broken.write_bytes(content[:-4] + b"torn")
        try:
            yield from map(fn, jobs)
        finally:
            broken.write_bytes(content)

    given = {"preparation": source.preparation(), "spec": ONE_FILE_PER_UNIT, "storage": source.storage, "progress": silent}
    with pytest.raises(DataError, match=r"part-\d+\.parquet"):
        materialize(key="a", parallel=noting, **given)
    assert {len(names) for names in tasks} == {4}
    records = [json.loads(file.read_text()) for file in tmp_path.rglob("unit.json")]
    assert sorted(name for record in records for name in record["files"]) == sorted([*tasks[0], *tasks[1][:2]])


def test_changing_a_file_prepares_that_file_only(tmp_path: Path) -> None:
    source = counted(tmp_path, parts(3))
    source.materialize()
    calls(tmp_path)
    write_files(tmp_path, {"train/part-01.parquet": part(700, rows=12)})
    source.materialize()
    assert calls(tmp_path) == [700]


@pytest.mark.parametrize("change", ["function", "params", "invalid", "shard_bytes"])
def test_whatever_changes_the_rows_prepares_them_again(tmp_path: Path, change: str) -> None:
    source = counted(tmp_path, parts(2))
    source.materialize()
    calls(tmp_path)
    spec = ONE_FILE_PER_UNIT
    if change == "function":
        counting_code(tmp_path, 'batch["x"] = batch["x"] * 2')
    elif change == "params":
        (tmp_path / "calls2").touch()
        source = Source.of(
            tmp_path,
            {},
            [{"map_batches": {"function": "count.py:count", "params": {"log": str(tmp_path / "calls2")}}}],
            label="y",
        )
    elif change == "invalid":
        source = counted(tmp_path, {}, invalid="drop")
    else:
        spec = MaterializeSpec(unit_bytes=1, shard_bytes=1 << 20)
    source.materialize(spec=spec)
    assert len(calls(tmp_path)) == 2 or len((tmp_path / "calls2").read_text().split()) == 2


@pytest.mark.parametrize("library", ["pillow", "simplejpeg", "torch"])
def test_new_image_library_prepares_only_images_again(tmp_path: Path, library: str) -> None:
    table = counted(tmp_path / "table", parts(1))
    content = io.BytesIO()
    Image.new("RGB", (4, 4)).save(content, "JPEG")
    pictures = Source.of(
        tmp_path / "images", {"train/a/0.jpg": content.getvalue()}, [{"drop": ["path", "label"]}], format="images"
    )
    before = {source.folder: source.materialize().shards[0].unit for source in (table, pictures)}
    known = importlib.metadata.version
    other = mock.patch.object(importlib.metadata, "version", lambda name: "0" if name == library else known(name))
    asked_again = mock.patch("penstock.ingest.materialize.unit._image_libraries", _image_libraries.__wrapped__)
    with other, asked_again, mock.patch("PIL.__version__", "0" if library == "pillow" else PIL.__version__):
        assert table.materialize().shards[0].unit == before[table.folder]
        assert pictures.materialize().shards[0].unit != before[pictures.folder]


def test_unrelated_change_prepares_nothing_again(tmp_path: Path) -> None:
    source = counted(tmp_path, parts(2))
    source.materialize()
    calls(tmp_path)
    path = tmp_path / "count.py"
    path.write_text("# a remark\n" + path.read_text() + "\n\ndef unrelated():\n    return 2\n")
    source.materialize()
    assert calls(tmp_path) == []


@pytest.mark.parametrize("content", ["", "{", '{"version": 1}', '{"version": 9, "key": "k"}'])
def test_unreadable_commit_record_is_ignored(tmp_path: Path, content: str) -> None:
    source = counted(tmp_path, parts(2))
    first = source.materialize()
    calls(tmp_path)
    unit = first.shards[1].unit
    source.storage.write_bytes(f"units/{unit}/unit.json", content.encode())
    assert source.materialize() == first
    assert calls(tmp_path) == [10]


@pytest.mark.parametrize("shard", [0, 1], ids=["the first of two shards", "the last shard"])
def test_failed_upload_leaves_unit_uncommitted(tmp_path: Path, shard: int) -> None:
    source, small = Source.of(tmp_path, parts(1)), MaterializeSpec(shard_bytes=120)
    manifest = source.materialize(spec=small)
    assert len(manifest.shards) == 2
    home = source.storage.local_path(f"units/{manifest.shards[0].unit}")
    (home / "unit.json").unlink()
    place = home / f"train-{shard:05d}.arrow"
    place.unlink()
    (place / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match=place.name):
        source.materialize(spec=small)
    assert not (home / "unit.json").exists()
    assert [path for path in home.iterdir() if path.name.startswith(".build")] == []
    (place / "in the way").rmdir()
    place.rmdir()
    assert source.materialize(spec=small) == manifest


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    import subprocess

    child = subprocess.Popen(["true"])
    child.wait()
    source = counted(tmp_path, parts(1))
    job = SimpleNamespace(storage=source.storage, key="other")
    with _scratch(job) as made:  # type: ignore[arg-type]
        own = made.name.rpartition(f"{os.getpid()}-")[0]
    unit = source.materialize().shards[0].unit
    home = source.storage.local_path(f"units/{unit}")
    stale = home / f"{own}{child.pid}-abc"
    stale.mkdir()
    of_other_machine = home / f".build-ray-worker-1-{child.pid}-abc"
    of_other_machine.mkdir()
    (stale / "train-00000.arrow").write_bytes(b"torn")
    (home / "unit.json").unlink()
    source.materialize()
    assert sorted(path.name for path in home.iterdir()) == [of_other_machine.name, "train-00000.arrow", "unit.json"]


# Damage.


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [Path.unlink, flip])
def test_damaged_table_is_written_again_from_kept_units(tmp_path: Path, damage: Any) -> None:
    source = counted(tmp_path, parts(4))
    manifest = source.materialize()
    calls(tmp_path)
    damage(source.storage.local_path(f"datasets/key/shards-{manifest.table.digest}.arrow"))
    assert source.materialize() == manifest
    assert calls(tmp_path) == []
    found = DatasetManifest.read(source.storage, "key")
    assert found is not None and list(found.shards) == list(manifest.shards)


@pytest.mark.parametrize(("damage", "shallow"), [(Path.unlink, 1), (truncate, 1), (flip, 0)])
def test_only_unit_of_damaged_shard_is_made_again(tmp_path: Path, damage: Any, shallow: int) -> None:
    source = counted(tmp_path, parts(4))
    manifest = source.materialize()
    assert damaged_shards(source.storage, manifest, deep=True) == []
    calls(tmp_path)
    victim = manifest.shards[2]
    damage(source.storage.local_path(victim.path))
    assert damaged_shards(source.storage, manifest, deep=True) == [victim]
    assert len(damaged_shards(source.storage, manifest, deep=False)) == shallow
    assert source.materialize() == manifest
    assert calls(tmp_path) == [20]
    assert damaged_shards(source.storage, manifest, deep=True) == []


def test_remote_damage_is_found_by_fetch_and_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = counted(tmp_path, parts(4))
    manifest = source.materialize()
    store = Storage(f"local://{source.storage.root}")  # the same files behind a URL, so that they count as remote
    calls(tmp_path)
    victim = manifest.shards[2]
    flip(source.storage.local_path(victim.path))
    assert store.size(victim.path) == victim.size_bytes, "no listing tells it from the one that was committed"
    with monkeypatch.context() as patch:
        patch.delattr(Storage, "open")
        patch.delattr(Storage, "get_file")
        assert damaged_shards(store, manifest, deep=True) == []
        assert source.materialize(store) == manifest
    with pytest.raises(DataError, match="another content than its manifest's digest") as caught:
        NodeCache(tmp_path / "cache").hold(store, victim)
    assert caught.value.next_step.startswith("run the pipeline again")

    assert damaged_shards(store, manifest, deep=False) == [victim]
    assert calls(tmp_path) == []
    assert source.materialize(store) == manifest
    assert calls(tmp_path) == [20]
    NodeCache(tmp_path / "cache").hold(store, victim)


def test_unit_made_again_with_other_rows_is_refused(tmp_path: Path) -> None:
    source = counted(tmp_path, parts(2), 'batch["x"] = batch["x"] + len(open(log).readlines()) // 3')
    manifest = source.materialize()
    flip(source.storage.local_path(manifest.shards[1].path))
    with pytest.raises(DataError, match="came out differently") as caught:
        source.materialize()
    assert manifest_path("key") in str(caught.value)


# Bad rows.


def dirty(count: int) -> dict[str, Any]:
    files = parts(count)
    files["train/part-01.parquet"] = part(10, z=pa.array([1, None, None, *range(7)]))
    files["train/part-03.parquet"] = part(30, z=pa.array([None, *range(9)]))
    return {name: t if "z" in t.column_names else t.append_column("z", pa.array(range(10))) for name, t in files.items()}


def test_bad_rows_of_all_units_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    source = counted(tmp_path, dirty(5))
    with pytest.raises(DataError) as caught:
        source.materialize()
    message = str(caught.value)
    assert "data.invalid: error: 3 rows have a null in z" in message
    assert "train/part-01.parquet, row 1 (from 0)" in message
    assert "imputer: {columns: [z]}" in message
    assert "data.invalid: drop" in message
    assert not source.storage.exists(manifest_path("key"))


def test_good_units_beside_bad_ones_are_kept(tmp_path: Path) -> None:
    source = counted(tmp_path, dirty(5))
    with pytest.raises(DataError):
        source.materialize()
    calls(tmp_path)
    with pytest.raises(DataError, match="3 rows"):
        source.materialize()
    assert calls(tmp_path) == [10, 30]


def test_dropped_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    source = Source.of(tmp_path, dirty(4), invalid="drop", label="y")
    manifest = source.materialize()
    assert manifest.rows["train"] == 37
    assert [sum(unit["dropped"].values()) for unit in units(source, manifest)] == [0, 2, 0, 1]
    assert manifest.rows_read == 40
    assert manifest.extra["dropped"] == {"null: z": 3}
    assert manifest.extra["first_dropped"]["null: z"].endswith("/train/part-01.parquet, row 1 (from 0)")
    assert source.column(manifest, "_row").tolist()[10:12] == [0, 3]


def test_transforms_learn_from_kept_rows_under_drop(tmp_path: Path) -> None:
    table = pa.table({"x": [1.0, 2.0, 600.0], "z": pa.array([1.0, 2.0, None]), "y": [0, 1, 0]})
    scaler = {"min_max_scaler": {"columns": ["x"]}}
    source = Source.of(tmp_path, {"train/a.parquet": table}, [scaler], label="y", invalid="drop")
    assert source.column(source.materialize(), "x").tolist() == [0.0, 1.0]
    filled = Source.of(tmp_path, {}, [scaler, {"imputer": {"columns": ["z"]}}], label="y", invalid="drop")
    assert filled.fit().steps[0].columns[0].scale == 599.0, "row 2 stays, so it counts"


def test_broken_image_is_dropped_beside_good_ones(tmp_path: Path) -> None:
    def png(value: int) -> bytes:
        stream = io.BytesIO()
        Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(stream, "PNG")
        return stream.getvalue()

    files = {"train/cat/a.png": png(1), "train/cat/b.png": png(2)[:50], "train/dog/c.png": png(3)}
    source = Source.of(tmp_path, files, ["label_encoder"], format="images", label="label", invalid="drop")
    manifest = source.materialize()
    assert manifest.rows["train"] == 2
    assert manifest.extra["dropped"] == {"broken image: image": 1}


def test_labels_missing_in_train_are_counted_and_named(tmp_path: Path) -> None:
    files = {"train/a.parquet": part(0), "test/a.parquet": pa.table({"x": np.zeros(4, np.float32), "y": [0, 7, 2, 7]})}
    source = Source.of(tmp_path, files, test="test", label="y")
    with pytest.raises(DataError, match=r"2 rows have a label y that is not a class.*test/a\.parquet, row 1 \(from 0\): 7"):
        source.materialize()


def test_class_only_in_train_is_accepted(tmp_path: Path) -> None:
    files = {"train/a.parquet": part(0), "test/a.parquet": pa.table({"x": np.zeros(1, np.float32), "y": [1]})}
    assert Source.of(tmp_path, files, test="test", label="y").materialize().feed_schema.num_classes == 3


def test_unseen_categories_of_one_hot_are_counted(tmp_path: Path) -> None:
    files = {"train/a.parquet": pa.table({"c": ["a", "b"]}), "test/a.parquet": pa.table({"c": ["a", "q", "r"]})}
    source = Source.of(tmp_path, files, [{"one_hot": {"columns": ["c"]}}], test="test")
    manifest = source.materialize()
    assert manifest.extra["unseen_categories"] == {"c": 2}
    assert source.column(manifest, "c", "test").tolist() == [[1, 0], [0, 0], [0, 0]]


def test_shapes_that_differ_between_files_are_named_with_both(tmp_path: Path) -> None:
    files = {"train/a.parquet": pa.table({"v": [[1, 2]]}), "train/b.parquet": pa.table({"v": [[1, 2, 3]]})}
    source = Source.of(tmp_path, files)
    with pytest.raises(DataError, match=r"'v' is int64\[2\] in a\.parquet, and int64\[3\] in b\.parquet"):
        source.materialize()
    with pytest.raises(DataError, match=r"'v' is int64\[2\] at .*a\.parquet, row 0.*int64\[3\] at .*b\.parquet, row 0"):
        source.materialize(spec=MaterializeSpec(unit_bytes=1 << 40))


def test_empty_train_split_error_names_reasons(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([None, None], pa.float32())})
    with pytest.raises(DataError, match=r"no rows are left to train on; left out: 2 \(null: x\)"):
        Source.of(tmp_path, {"train/a.parquet": table}, invalid="drop").materialize()


def test_commit_record_describes_unit(tmp_path: Path) -> None:
    source = Source.of(tmp_path, parts(1), label="y")
    manifest = source.materialize()
    record = json.loads(source.storage.read_bytes(f"units/{manifest.shards[0].unit}/unit.json"))
    assert record["files"] == ["part-00.parquet"]
    assert record["shards"] == [shard.model_dump() for shard in manifest.shards]
    assert record["rows_read"] == 10
    assert [entry["rows"] for entry in record["classes"]["train"]] == [4, 3, 3]


@pytest.mark.s3
def test_a_dataset_on_an_object_store_is_the_same(tmp_path: Path, s3_bucket: str) -> None:
    source = counted(tmp_path, parts(3))
    local = source.materialize()
    remote = Storage(f"{s3_bucket}/state")
    calls(tmp_path)
    assert source.materialize(remote) == local
    assert calls(tmp_path) == [0, 10, 20]
    remote.delete(local.shards[1].path)
    assert source.materialize(remote) == local
    assert calls(tmp_path) == [10]
    assert damaged_shards(remote, local, deep=True) == []


def test_single_class_and_empty_split_are_warned_of(tmp_path: Path) -> None:
    table = pa.table({"x": [1.0, 2.0, 3.0], "y": [1, 1, 1], "g": [5, 5, 5]})
    source = Source.of(tmp_path, {"train/a.parquet": table}, label="y", test={"fraction": 0.01, "by": "g"})
    manifest = source.materialize()
    assert one_class(manifest).startswith("the label 'y' has one class, 1, in all 3 rows of train:")
    assert [said[:40] for said in empty_splits(manifest, source.data)] == ["data.test is given and holds no rows: it"]
    files = {"train/a.parquet": pa.table({"y": [0, 1]}), "test/a.parquet": pa.table({"y": [1]})}
    two = Source.of(tmp_path / "two", files, label="y", test="test")
    assert one_class(two.materialize()) == "" and empty_splits(two.materialize(), two.data) == []


def test_class_indices_of_shape_one_are_classes(tmp_path: Path) -> None:
    labels = np.arange(18, dtype=np.uint8) % 9
    rows = {"x": np.arange(18.0), "y": pa.FixedSizeListArray.from_arrays(labels, 1)}
    manifest = Source.of(tmp_path, {"train/a.parquet": pa.table(rows)}, label="y").materialize()
    assert manifest.feed_schema.num_classes == 9 and manifest.feed_schema["y"].type_text == "int64"
    amounts = {"x": np.arange(18.0), "y": pa.FixedSizeListArray.from_arrays(labels.astype(np.float32), 1)}
    manifest = Source.of(tmp_path / "amounts", {"train/a.parquet": pa.table(amounts)}, label="y").materialize()
    assert manifest.feed_schema["y"].type_text == "float32[1]", "a loss may subtract it from outputs of that shape"
