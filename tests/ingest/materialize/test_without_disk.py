"""Rows that no disk keeps: the same rows, digest and errors as on disk, whichever way they are read."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import DataError
from penstock.ingest.feed.cached import open_cached_feed
from penstock.ingest.feed.stream import MemoryFeed
from penstock.ingest.feed.stream_tasks import stream_tasks, streams_cpus
from penstock.ingest.manifest import DatasetManifest, ShardTable
from penstock.ingest.materialize.without_disk import RowSource
from penstock.ingest.prepare import ClusterNode, PrepareSpec
from penstock.ingest.shuffle.order import Order
from penstock.ingest.spec import MaterializeSpec
from penstock.progress import silent
from penstock.storage import Storage
from tests.ingest.preparing import ONE_FILE_PER_UNIT, Source


def part(start: int, rows: int = 40) -> pa.Table:
    """Rows with lists: as many tokens and marks as the row's number modulo 7 and 3, and the row's number in each."""
    ids = np.arange(start, start + rows)
    lists = {name: [[i] * (i % most) for i in ids.tolist()] for name, most in (("tokens", 7), ("marks", 3))}
    return pa.table({"x": ids.astype(np.float32), "y": np.arange(rows) % 3, **lists})


def source_of(folder: Path, **data: Any) -> Source:
    files = {f"train/part-{i}.parquet": part(i * 40) for i in range(3)}
    files["held/part-0.parquet"] = part(500, 7)
    steps = [
        {"standard_scaler": {"columns": ["x"]}},
        {"ragged": {"columns": ["tokens"]}},
        {"ragged": {"columns": ["marks"], "batch": "packed"}},
    ]
    return Source.of(folder, files, steps, label="y", **{"validation": {"fraction": 0.25}, "test": "held", **data})


def uncached(source: Source, spec: MaterializeSpec = ONE_FILE_PER_UNIT) -> RowSource:
    return RowSource(source.preparation(), spec)


def without_streams(manifest: DatasetManifest) -> DatasetManifest:
    return manifest.model_copy(update={"extra": {k: v for k, v in manifest.extra.items() if k != "streams"}})


def test_manifest_equals_disk_manifest_without_shards(tmp_path: Path, ray_cluster: None) -> None:
    source = source_of(tmp_path)
    described = uncached(source).describe("key", silent)
    assert not source.storage.local_path().exists()
    on_disk = source.materialize()
    assert without_streams(described) == on_disk.model_copy(update={"table": ShardTable()})
    assert described.rows["validation"] > 0


def test_rows_in_memory_are_the_rows_on_disk_in_the_same_order(tmp_path: Path, ray_cluster: None) -> None:
    source = source_of(tmp_path)
    small_shards = MaterializeSpec(unit_bytes=1, shard_bytes=400)
    manifest, datasets = uncached(source, small_shards).put("key", silent)
    on_disk = source.materialize(spec=small_shards)
    assert manifest == on_disk.model_copy(update={"table": ShardTable()})
    assert set(datasets) == {"train", "validation", "test"}
    for split, dataset in datasets.items():
        order = Order(mode="global", seed=4, rows=manifest.rows[split])
        assert dataset.size_bytes == sum(shard.size_bytes for shard in on_disk.shards_of(split))
        in_memory = MemoryFeed(dataset, batch_rows=16, order=order)
        cached = open_cached_feed([(source.storage, on_disk)], split, batch_rows=16, order=order)
        assert in_memory.state_dict() == cached.state_dict()  # so either continues what the other began
        for ours, theirs in zip(in_memory.batches(1), cached.batches(1), strict=True):
            assert ours.row_ids.tolist() == theirs.row_ids.tolist()
            assert set(theirs.columns) >= {"tokens_length", "marks_offsets"}
            for name, tensor in theirs.columns.items():
                assert ours.columns[name].equal(tensor)


def test_stream_has_rows_in_disk_order(tmp_path: Path, ray_cluster: None) -> None:
    source = source_of(tmp_path)
    ours = pickle.loads(pickle.dumps(uncached(source)))
    described, manifest = ours.describe("key", silent), source.materialize()
    for split in ("train", "validation", "test"):
        units = ours.units(described, split)
        found = [np.concatenate([table.column("x") for table in ours.tables(split, unit)]) for unit in units]
        assert [len(rows) for rows in found] == [unit.rows for unit in units]
        np.testing.assert_array_equal(np.concatenate(found), source.column(manifest, "x", split))


def test_large_file_is_cut_as_on_disk(tmp_path: Path, ray_cluster: None) -> None:
    (tmp_path / "train").mkdir()
    pq.write_table(part(0, 16_384), tmp_path / "train" / "a.parquet", row_group_size=2048)
    steps = [{"standard_scaler": {"columns": ["x"]}}, {"ragged": {"columns": ["tokens"]}}, {"drop": ["marks"]}]
    source = Source.of(tmp_path, {}, steps, label="y", validation={"fraction": 0.25})
    ours = RowSource(source.preparation(), MaterializeSpec(), piece_bytes=20_000)
    whole = source.materialize(source.storage, MaterializeSpec())
    cut = source.materialize(Storage(str(tmp_path / "cut")), MaterializeSpec(), piece_bytes=20_000)
    assert whole.units == 1 and cut.units == 4
    described = ours.describe("key", silent)
    assert without_streams(described) == cut.model_copy(update={"table": ShardTable()})
    assert ours.put("key", silent)[0] == cut.model_copy(update={"table": ShardTable()})
    assert cut.rows == whole.rows
    for split in ("train", "validation"):
        units = ours.units(described, split)
        assert [unit.piece for unit in units] == [(first, first + 4096) for first in range(0, 16_384, 4096)]
        found = [table.column("x").to_numpy() for unit in units for table in ours.tables(split, unit)]
        np.testing.assert_array_equal(np.concatenate(found), source.column(whole, "x", split))


def test_only_files_of_a_split_are_read_for_it(tmp_path: Path, ray_cluster: None) -> None:
    units = uncached(source_of(tmp_path))
    described = units.describe("key", silent)
    for split, location in (("train", "train"), ("validation", "train"), ("test", "test")):
        files = [file for unit in units.units(described, split) for file in unit.files]
        assert {file.location for file in files} == {location}


@pytest.mark.parametrize("way", ["describe", "put"])
def test_bad_rows_are_counted_as_on_disk(tmp_path: Path, way: str, ray_cluster: None) -> None:
    broken = {f"train/part-{i}.parquet": pa.table({"x": [1.0, None, 3.0], "y": [0, 1, 0]}) for i in range(2)}
    source = Source.of(tmp_path, broken, label="y")
    with pytest.raises(DataError) as on_disk:
        source.materialize()
    with pytest.raises(DataError) as found:
        getattr(uncached(source), way)("key", silent)
    assert str(found.value) == str(on_disk.value)
    assert "2 rows have a null in x" in str(found.value)


def test_bad_rows_are_dropped_under_drop(tmp_path: Path, ray_cluster: None) -> None:
    broken = {f"train/part-{i}.parquet": pa.table({"x": [1.0, None, 3.0], "y": [0, 1, 0]}) for i in range(2)}
    source = Source.of(tmp_path, broken, label="y", invalid="drop")
    manifest, datasets = uncached(source).put("key", silent)
    assert manifest.rows["train"] == datasets["train"].num_rows == 4
    assert manifest.rows_read - sum(manifest.rows.values()) == 2


@pytest.mark.parametrize(
    ("free_cpus", "where", "tasks"),
    [(0.5, {}, 1), (1.0, {}, 2), (2.0, {}, 3), (14.0, {}, 15), (14.0, {"concurrency": 4}, 2), (14.0, {"cpus": 2}, 3)],
)
def test_all_tasks_of_all_streams_fit_into_the_free_cpus(free_cpus: float, where: dict[str, Any], tasks: int) -> None:
    of = PrepareSpec.model_validate(where)
    assert stream_tasks(free_cpus, of, [ClusterNode({"CPU": 16.0}, {})]) == tasks
    assert streams_cpus(of) * tasks <= free_cpus
