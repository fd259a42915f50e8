"""Rows that two splits share are found by their content, whatever files, units and formats they come in."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from penstock.errors import DataError
from penstock.ingest.materialize.shared_rows import SharedRows
from penstock.ingest.materialize.unit import committed, hashes_path
from penstock.ingest.materialize.without_disk import RowSource
from penstock.ingest.spec import MaterializeSpec
from penstock.progress import silent
from tests.ingest.preparing import ONE_FILE_PER_UNIT, Source


def rows(start: int, stop: int, kind: str = "int32") -> pa.Table:
    return pa.table({"id": pa.array(range(start, stop), pa.type_for_alias(kind)), "y": [i % 3 for i in range(start, stop)]})


def found(manifest: Any) -> list[SharedRows]:
    return [SharedRows.model_validate(each) for each in manifest.extra["shared_rows"]]


FILES = {
    "train/a.parquet": rows(0, 500),
    "train/b.parquet": rows(500, 1000),
    "val/a.parquet": rows(2000, 2100),
    # Of 49 rows 8 are in train, two of them twice, and 3 in validation; the type is another.
    "test/a.parquet": pa.concat_tables(
        [rows(3000, 3038, "int64"), rows(700, 706, "int64"), rows(700, 702, "int64"), rows(2050, 2053, "int64")]
    ),
}


@pytest.mark.parametrize("unit_bytes", [1, 8 << 20])
def test_shared_rows_are_counted_and_first_is_named(tmp_path: Path, unit_bytes: int) -> None:
    source = Source.of(tmp_path, FILES, label="y", validation="val", test="test")
    spec = MaterializeSpec(unit_bytes=unit_bytes, shard_bytes=1000)
    of_train, of_validation = found(source.materialize(spec=spec))
    assert (of_train.held_out, of_train.other, of_train.rows, of_train.of_rows) == ("test", "train", 8, 49)
    assert of_train.first == (f"{tmp_path}/test/a.parquet, row 38 (from 0) is {tmp_path}/train/b.parquet, row 200 (from 0)")
    assert (of_validation.held_out, of_validation.other, of_validation.rows) == ("test", "validation", 3)
    assert "8 of 49 rows of test are in train, too" in str(of_train)
    assert found(source.materialize(spec=spec)) == [of_train, of_validation], "units that were there say the same"
    refusing = Source.of(tmp_path, label="y", validation="val", test="test", duplicates="refuse")
    with pytest.raises(DataError, match="refuse") as caught:
        refusing.materialize(spec=spec)
    assert list(caught.value.problems) == [str(of_train), str(of_validation)]


def test_unit_with_truncated_hashes_is_made_again(tmp_path: Path) -> None:
    source = Source.of(tmp_path, FILES, label="y", validation="val", test="test")
    key = source.materialize().shards[0].unit
    path = source.storage.local_path(hashes_path(key, "train"))
    path.write_bytes(path.read_bytes()[:-8])
    assert committed(source.storage, key) is None
    assert len(found(source.materialize())) == 2


def test_only_rules_by_column_store_hashes(tmp_path: Path) -> None:
    table = pa.table({"x": [i // 2 for i in range(400)], "patient": [i % 2 for i in range(400)]})
    by_row = Source.of(tmp_path, {"train/a.parquet": table}, columns=["x"], test={"fraction": 0.3})
    manifest = by_row.materialize()
    assert found(manifest) == []
    assert not list(by_row.storage.local_path().rglob("*.hashes"))
    table = pa.table({"x": [i // 2 for i in range(400)], "g": range(400)})
    by_group = Source.of(tmp_path / "g", {"train/a.parquet": table}, columns=["x"], test={"fraction": 0.3, "by": "g"})
    (shared,) = found(by_group.materialize())
    in_test, in_train = (by_group.column(by_group.materialize(), "x", split) for split in ("test", "train"))
    assert shared.rows == int(np.isin(in_test, in_train).sum()) > 0


def test_equal_pictures_of_two_names_are_shared_rows(tmp_path: Path) -> None:
    def png(shade: int) -> bytes:
        content = io.BytesIO()
        Image.new("RGB", (4, 4), (shade, 0, 0)).save(content, "PNG")
        return content.getvalue()

    files = {f"train/cat/{i}.png": png(i) for i in range(9)} | {"test/cat/x.png": png(3), "test/cat/y.png": png(99)}
    source = Source.of(tmp_path, files, ["label_encoder"], format="images", label="label", test="test")
    (shared,) = found(source.materialize())
    assert (shared.rows, shared.of_rows) == (1, 2)
    assert "test/cat/x.png" in shared.first and "train/cat/3.png" in shared.first


def test_shared_rows_are_found_without_disk_cache(tmp_path: Path, ray_cluster: None) -> None:
    source = Source.of(tmp_path, FILES, label="y", validation="val", test="test")
    for manifest in (
        RowSource(source.preparation(), ONE_FILE_PER_UNIT).describe("key", silent),
        RowSource(source.preparation(), ONE_FILE_PER_UNIT).put("key", silent)[0],
    ):
        assert [each.rows for each in found(manifest)] == [8, 3]
        assert found(manifest)[0].first == f"a row of {tmp_path}/test/a.parquet is a row of {tmp_path}/train/b.parquet"
