"""A large file is fitted and prepared in pieces; its rows, their splits, and what is learnt are those of the whole file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.materialize.build import materialize
from penstock.ingest.materialize.shard_file import open_shard
from penstock.ingest.preprocess.chain import Preparation
from penstock.ingest.preprocess.fit import fit_preprocess
from penstock.ingest.ray_tasks import local_map
from penstock.ingest.read.snapshot import read_source
from penstock.ingest.spec import MaterializeSpec
from penstock.progress import silent
from penstock.storage import Storage
from tests.ingest.preparing import Source
from tests.ingest.reading import listed

_ROWS = 30_000

_STEPS = [{"standard_scaler": {"columns": ["x"]}}, {"robust_scaler": {"columns": ["y"]}}, {"one_hot": {"columns": ["c"]}}]


@pytest.fixture(scope="module")
def table() -> pa.Table:
    random = np.random.default_rng(7)
    columns = {"x": random.standard_normal(_ROWS) * 1e3 + 17, "y": random.random(_ROWS), "label": random.integers(0, 3, _ROWS)}
    return pa.table({**columns, "c": pa.array(np.array(["a", "b, c", "d"])[random.integers(0, 3, _ROWS)])})


def _source(folder: Path, table: pa.Table, format: str) -> Source:
    folder.mkdir(parents=True)
    if format == "csv":
        pyarrow.csv.write_csv(table, folder / "a.csv")
    else:
        pq.write_table(table, folder / "a.parquet", row_group_size=3000)
    return Source.of(folder, None, _STEPS, format=format, train=".", label="label", validation={"fraction": 0.2})


def _prepared(source: Source, folder: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, DatasetManifest]:
    monkeypatch.setattr("penstock.ingest.formats.reader.CUT_BYTES", piece_bytes)
    monkeypatch.setattr("penstock.ingest.formats.csv._BLOCK_BYTES", min(piece_bytes, 4 << 20))
    monkeypatch.setattr("penstock.ingest.preprocess.fit.PART_BYTES", piece_bytes)
    snapshot = read_source(source.data, listed(source.data, source.folder), silent)
    fitted = fit_preprocess(source.data, source.steps, snapshot, {}, silent, parallel=local_map)
    manifest = materialize(
        key="k",
        preparation=Preparation(source.data, source.steps, fitted, snapshot, {}),
        spec=MaterializeSpec(),
        storage=Storage(str(folder)),
        progress=silent,
        parallel=local_map,
        piece_bytes=piece_bytes,
    )
    return fitted, manifest


def _rows(folder: Path, manifest: DatasetManifest, split: str) -> dict[str, np.ndarray]:
    shards = [open_shard(folder / shard.path) for shard in manifest.shards if shard.split == split]
    names = [column.name for column in shards[0].columns]
    return {name: np.concatenate([shard.column(name) for shard in shards]) for name in [*names, "_row"]}


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_pieces_equal_the_whole_file(tmp_path: Path, table: pa.Table, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _source(tmp_path / "source", table, format)
    whole_fit, whole = _prepared(source, tmp_path / "whole", 1 << 30, monkeypatch)
    cut_fit, cut = _prepared(source, tmp_path / "cut", 100_000, monkeypatch)
    assert whole.units == 1 and cut.units >= 4
    assert cut_fit == whole_fit  # sums to the last bit
    assert cut.rows == whole.rows
    for split in ("train", "validation"):
        found, expected = (_rows(tmp_path / name, each, split) for name, each in (("cut", cut), ("whole", whole)))
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)
    assert cut.rows_read == _ROWS
    profiles = [each.extra["profile"]["files"] for each in (cut, whole)]
    assert profiles[0] == profiles[1]
    assert cut.extra["class_counts"] == whole.extra["class_counts"]
