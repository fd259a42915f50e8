"""The dataset that is predicted from counts of rows, and the units that are made in the order of their use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import DataError
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.materialize.shard_file import ShardBuffer, rows_of_shards
from penstock.ingest.ray_tasks import local_map
from penstock.ingest.schema import ColumnInfo
from penstock.ingest.spec import MaterializeSpec
from tests.ingest.preparing import Source

FILES = {f"train/part-{i}.parquet": pa.table({"x": np.arange(9.0 + i), "y": ["a", "b", "c"] * 3 + ["a"] * i}) for i in range(5)}
HELD_OUT = {"validation/a.parquet": pa.table({"x": [70.5, 71.5], "y": ["a", "b"]})}


def source(folder: Path, *steps: Any, files: dict[str, Any] = FILES, **data: Any) -> Source:
    return Source.of(folder, {**files, **HELD_OUT}, steps or ["label_encoder"], validation="validation", label="y", **data)


def begun(found: list[DatasetManifest], order: Sequence[int] = ()) -> Callable[[DatasetManifest], list[str]]:
    """Keep the predicted dataset, and ask for the units of these train shards in turn."""

    def begin(predicted: DatasetManifest) -> list[str]:
        found.append(predicted)
        return [predicted.shards_of("train")[index].unit for index in order]

    return begin


@pytest.mark.parametrize("shard_bytes", [64 << 20, 120])
def test_predicted_dataset_is_the_one_that_is_made(tmp_path: Path, shard_bytes: int) -> None:
    found: list[DatasetManifest] = []
    spec = MaterializeSpec(unit_bytes=1, shard_bytes=shard_bytes)
    made = source(tmp_path).materialize(spec=spec, begin=begun(found))
    (predicted,) = found
    assert [(shard.path, shard.split, shard.rows, shard.unit) for shard in predicted.shards] == [
        (shard.path, shard.split, shard.rows, shard.unit) for shard in made.shards
    ]
    assert all(shard.is_pending for shard in predicted.shards) and not any(shard.is_pending for shard in made.shards)
    same = ("key", "feed_schema", "rows", "units", "rows_read", "split_digests")
    assert predicted.model_dump(include={*same}) == made.model_dump(include={*same})
    # Again, with all units there; and with others in one split.
    assert source(tmp_path).materialize(spec=spec, begin=begun(found)).split_digests == made.split_digests
    other = source(tmp_path / "other", files={**FILES, "train/z.parquet": FILES["train/part-0.parquet"]})
    changed = other.materialize(spec=spec, begin=begun(found)).split_digests
    assert {split for split in changed if changed[split] != made.split_digests[split]} == {"train"}


def test_units_are_made_in_the_order_of_their_use(tmp_path: Path) -> None:
    made: list[str] = []

    def noting(fn: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        for item in items:
            made.extend(job.files[0].name for job in item)
            yield from local_map(fn, [item])

    source(tmp_path).materialize(parallel=noting, begin=begun([], [3, 1, 4, 2]))
    assert made == [*(f"part-{number}.parquet" for number in (0, 3, 1, 4, 2)), "a.parquet"]


def test_label_without_known_classes_is_refused(tmp_path: Path) -> None:
    files = {name: pa.table({"x": table["x"], "y": np.arange(len(table)) % 3}) for name, table in FILES.items()}
    files |= {"validation/a.parquet": pa.table({"x": [70.5, 71.5], "y": [0, 1]})}
    numbers = Source.of(tmp_path, files, validation="validation", label="y")
    with pytest.raises(DataError, match="label 'y' is int64, and the number of its classes is known only when all") as refused:
        numbers.materialize(begin=begun([]))
    assert "label_encoder" in refused.value.next_step and "cast: {y: float32}" in refused.value.next_step
    assert not list(tmp_path.glob("state/datasets/*/manifest.json"))


def test_unit_with_bad_rows_ends_it_at_once(tmp_path: Path) -> None:
    files = {**FILES, "train/part-3.parquet": pa.table({"x": [1.0, None, None], "y": ["a", "b", "c"]})}
    with pytest.raises(DataError) as refused:
        source(tmp_path, files=files).materialize(begin=begun([], [3, 1, 4, 2]))
    assert "2" in str(refused.value) and "part-3.parquet" in str(refused.value)
    assert len(list(tmp_path.glob("state/units/*/unit.json"))) == 1  # the first; the others were not begun


def test_unit_of_other_rows_than_its_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "few.py").write_text("def few(batch):\n    return {**batch, '_keep': batch['x'] < 11}\n")
    few = source(tmp_path, "label_encoder", {"map_batches": "few.py:few"})
    with pytest.raises(DataError, match=r"a shard units/\w+/train-00000.arrow of 11 rows, where .* of 12 rows was expected"):
        few.materialize(begin=begun([]))
    assert not list(tmp_path.glob("state/datasets/*/manifest.json"))


def test_first_unit_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("def none(batch):\n    return {**batch, '_keep': batch['x'] > 99}\n")
    with pytest.raises(DataError, match="a unit of 9 rows has 0 after the transforms"):
        source(tmp_path, "label_encoder", {"map_batches": "none.py:none"}).materialize(begin=begun([]))


def test_damaged_unit_is_not_committed_when_training_begins(tmp_path: Path) -> None:
    made = source(tmp_path).materialize(spec=MaterializeSpec(unit_bytes=1))
    (manifest,) = tmp_path.glob("state/datasets/*/manifest.json")
    manifest.unlink()
    damaged = tmp_path / "state" / made.shards_of("train")[3].path
    content = bytearray(damaged.read_bytes())
    content[-200] ^= 1
    damaged.write_bytes(content)
    there: list[bool] = []

    def begin(predicted: DatasetManifest) -> list[str]:
        there.extend((tmp_path / "state" / shard.path).with_name("unit.json").exists() for shard in predicted.shards)
        return []

    again = source(tmp_path).materialize(spec=MaterializeSpec(unit_bytes=1), begin=begin)
    assert there == [True, True, True, False, True, True]
    assert again.shards[3].digest == made.shards[3].digest


@pytest.mark.parametrize("shard_bytes", [1, 99, 100, 200, 1 << 20])
def test_rows_of_shards_are_those_that_the_buffer_cuts(shard_bytes: int) -> None:
    columns = (ColumnInfo(name="x", dtype="float64"), ColumnInfo(name="y", dtype="int64"))
    buffer, table = ShardBuffer(shard_bytes), pa.table({"x": np.arange(50.0), "y": np.arange(50)})
    cut = [sum(map(len, tables)) for part in (0, 20) for tables in buffer.add(table.slice(part, 20 + part // 2))]
    cut += [sum(map(len, tables)) for tables in buffer.finish()]
    assert rows_of_shards(columns, 50, shard_bytes) == cut
    assert not rows_of_shards(columns, 0, shard_bytes)
    assert rows_of_shards((*columns, ColumnInfo(name="z", dtype="int64", ragged="packed")), 50, shard_bytes) == [50]
