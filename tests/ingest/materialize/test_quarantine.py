"""Rows that cannot be used are listed one by one and left out, the good ones of their files stay, and a budget bounds them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from penstock.errors import DataError
from penstock.ingest.manifest import manifest_path
from penstock.ingest.materialize.quarantine import dataset_quarantine_path
from tests.ingest.preparing import HOLDS, ONE_FILE_PER_UNIT, Source, counting_code, killed_in

ALL = {"invalid": "quarantine", "quarantine": {"max_fraction": 1.0}}


def listed(source: Source, key: str = "key") -> list[tuple[Any, ...]]:
    table = pq.read_table(pa.BufferReader(source.storage.read_bytes(dataset_quarantine_path(key))))
    return [tuple(row.values()) for row in table.to_pylist()]


def test_unreadable_csv_cells_are_listed(tmp_path: Path) -> None:
    files = {
        "train/a.csv": "age,name,y\n1,x,0\nold,x,1\n3,x,0\n,x,1\n5,x,0\n",
        "train/b.csv": "age,name,y\n1,x,0\n2,x,one\n3,x,1\n",
    }
    steps = [{"drop": ["name"]}]
    source = Source.of(tmp_path, files, steps, format="csv", label="y", types={"age": "int64", "y": "int64"}, **ALL)
    manifest = source.materialize()
    assert source.column(manifest, "age").tolist() == [1, 3, 5, 1, 3]
    assert source.column(manifest, "_row").tolist() == [0, 2, 4, 0, 2]
    assert listed(source) == [
        ("train", "a.csv", 1, "age", "unreadable", "'old' does not read as int64"),
        ("train", "a.csv", 3, "age", "null", None),
        ("train", "b.csv", 1, "y", "unreadable", "'one' does not read as int64"),
    ]
    assert manifest.rows_quarantined == 3
    assert manifest.extra["dropped"] == {"unreadable: age": 1, "null: age": 1, "unreadable: y": 1}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"x": 1, "y": 0}\n{"x": "a", "y": 1}\n{"x": 3, "y": 1}\n'),
        ("a.parquet", pa.table({"x": ["1", "a", "3"], "y": [0, 1, 1]})),
    ],
)
def test_unreadable_values_of_other_formats_are_listed(tmp_path: Path, name: str, content: Any) -> None:
    format = {"jsonl": "json"}.get(name.split(".")[1], "parquet")
    source = Source.of(tmp_path, {f"train/{name}": content}, format=format, types={"x": "int64"}, label="y", **ALL)
    assert source.column(source.materialize(), "x").tolist() == [1, 3]
    assert listed(source) == [("train", name, 1, "x", "unreadable", "'a' does not read as int64")]


def test_transform_problems_are_listed_and_not_learnt(tmp_path: Path) -> None:
    table = pa.table(
        {
            "size": ["1", "2", "huge", "4", "5", "6"],
            "kind": ["a", "b", "a", "b", "a", None],
            "x": [1.0, 2.0, 4.0, 1000.0, 3.0, 4000.0],
            "y": [0, 1, 0, -1, 1, 0],
        }
    )
    steps = [{"cast": {"size": "int64"}}, {"ordinal": {"columns": ["kind"]}}, {"standard_scaler": {"columns": ["x"]}}]
    source = Source.of(tmp_path, {"train/a.parquet": table}, steps, label="y", **ALL)
    manifest = source.materialize()
    assert listed(source) == [
        ("train", "a.parquet", 2, "size", "unreadable", "'huge' does not become int64 without loss"),
        ("train", "a.parquet", 3, "y", "label out of range", "-1"),
        ("train", "a.parquet", 5, "kind", "null", None),
    ]
    assert manifest.rows["train"] == 3
    center = source.fit().steps[2].columns[0].center
    # Row 5 lacks a value that no step fills; that of row 3 is found by the last check, when the steps have learnt.
    assert center == pytest.approx((1 + 2 + 1000 + 3) / 4)


def test_transforms_learn_from_kept_rows_under_drop(tmp_path: Path) -> None:
    table = pa.table({"x": [1.0, 2.0, 600.0], "z": pa.array([1.0, 2.0, None]), "y": [0, 1, 0]})
    scaler = {"min_max_scaler": {"columns": ["x"]}}
    source = Source.of(tmp_path, {"train/a.parquet": table}, [scaler], label="y", invalid="drop")
    assert source.column(source.materialize(), "x").tolist() == [0.0, 1.0]
    filled = Source.of(tmp_path, {}, [scaler, {"imputer": {"columns": ["z"]}}], label="y", invalid="drop")
    assert filled.fit().steps[0].columns[0].scale == 599.0, "row 2 stays, so it counts"


def test_broken_images_are_listed_or_dropped_beside_good_ones(tmp_path: Path) -> None:
    def png(value: int) -> bytes:
        stream = io.BytesIO()
        Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(stream, "PNG")
        return stream.getvalue()

    files = {"train/cat/a.png": png(1), "train/cat/b.png": png(2)[:50], "train/dog/c.png": png(3)}
    source = Source.of(tmp_path, files, ["label_encoder"], format="images", label="label", **ALL)
    assert source.materialize().rows["train"] == 2
    ((location, file, row, column, reason, _),) = listed(source)
    assert (location, file, row, column, reason) == ("train", "cat/b.png", 0, "image", "unreadable")
    source = Source.of(tmp_path / "dropped", files, ["label_encoder"], format="images", label="label", invalid="drop")
    manifest = source.materialize()
    assert manifest.rows["train"] == 2
    assert manifest.extra["dropped"] == {"broken image: image": 1}


@pytest.mark.parametrize(
    ("budget", "stops"),
    [({"max_rows": 1}, True), ({"max_fraction": 0.05}, True), ({"max_fraction": 0.1, "max_rows": 2}, False)],
)
def test_over_budget_run_stops_and_names_first_rows(tmp_path: Path, budget: dict[str, Any], stops: bool) -> None:
    files = {f"train/{n}.parquet": pa.table({"x": pa.array([1.0] * 9 + [None]), "y": [0, 1] * 5}) for n in range(2)}
    generous = {"max_fraction": 1.0}
    source = Source.of(tmp_path, files, label="y", invalid="quarantine", quarantine=generous | budget)
    if not stops:
        assert source.materialize(spec=ONE_FILE_PER_UNIT).rows_quarantined == 2
        return
    with pytest.raises(DataError, match=r"2 rows or more cannot be used") as caught:
        source.materialize(spec=ONE_FILE_PER_UNIT)
    assert "train/0.parquet, row 9 (from 0)" in str(caught.value)
    assert caught.value.exit_code == 4
    assert not source.storage.exists(manifest_path("key"))


def test_a_budget_without_a_quarantine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="budget of invalid: quarantine"):
        Source.of(tmp_path, {}, quarantine={"max_rows": 1})


def bad_source(folder: Path) -> Source:
    """Twelve units of five rows, one of them bad."""
    files = {f"train/{n:02d}.csv": "x,y\n1,0\n2,1\nbad,1\n4,0\n5,1\n" for n in range(12)}
    target = counting_code(folder, HOLDS)
    step = {"map_batches": {"function": target, "params": {"log": str(folder / "calls")}}}
    present = {} if (folder / "train").exists() else files
    return Source.of(folder, present, [step], format="csv", label="y", types={"x": "int64"}, **ALL)


def test_after_kill_9_table_and_counts_are_exact(tmp_path: Path) -> None:
    bad_source(tmp_path)
    assert killed_in(5, "tests.ingest.materialize.test_quarantine:bad_source", tmp_path, 4) == 4
    source = bad_source(tmp_path)
    assert not source.storage.exists(manifest_path("key"))
    manifest = source.materialize()
    assert manifest.rows_quarantined == 12
    assert [(file, row) for _, file, row, *_ in listed(source)] == [(f"{n:02d}.csv", 2) for n in range(12)]


def test_unit_without_its_quarantine_table_is_made_again(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([1.0, None]), "y": [0, 1]})
    source = Source.of(tmp_path, {"train/a.parquet": table}, label="y", **ALL)
    before = source.materialize()
    (part,) = tmp_path.glob("state/units/*/quarantine.parquet")
    part.unlink()
    source.storage.delete(manifest_path("key"))
    assert source.materialize() == before
    assert part.exists()
