"""The same dataset from Ray tasks as from this process, and errors that come out of workers as they were raised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import DataError
from penstock.ingest.ray_tasks import local_map, ray_map
from penstock.storage import Storage
from tests.ingest.preparing import Source

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

RNG = np.random.default_rng(0)


def files(count: int) -> dict[str, Any]:
    return {
        f"train/part-{i}.parquet": pa.table(
            {
                "x": RNG.normal(size=50),
                "image": pa.array([[i, j] for j in range(50)], pa.list_(pa.uint8(), 2)),
                "y": np.arange(50) % 5,
            }
        )
        for i in range(count)
    }


def test_ray_and_one_process_make_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text("def f(batch):\n    batch['x'] = batch['x'] - batch['x'].mean()\n    return batch\n")
    steps = [{"map_batches": "user.py:f"}, {"standard_scaler": {"columns": ["x"]}}]
    source = Source.of(tmp_path, files(6), steps, validation={"fraction": 0.2}, label="y")
    fitted = source.fit(ray_map)
    here = source.materialize(Storage(str(tmp_path / "here")), parallel=local_map, fitted=fitted)
    ray = source.materialize(Storage(str(tmp_path / "ray")), parallel=ray_map, fitted=fitted)
    assert ray == here


def test_bad_rows_of_all_units_are_reported_from_workers(tmp_path: Path) -> None:
    bad = {name: table.append_column("z", pa.array([None, *range(49)])) for name, table in files(3).items()}
    with pytest.raises(DataError, match=r"3 rows have a null in z; first: .*part-0\.parquet, row 0"):
        Source.of(tmp_path, bad, label="y").materialize(parallel=ray_map)


def test_user_code_runs_in_workers_without_project_path(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "helper.py").write_text("SCALE = 3.0\n")
    (project / "user.py").write_text("from helper import SCALE\n\ndef f(batch):\n    batch['x'] *= SCALE\n    return batch\n")
    source = Source.of(project, {"train/a.parquet": pa.table({"x": [1.0, 2.0]})}, [{"map_batches": "user.py:f"}])
    manifest = source.materialize(parallel=ray_map)
    assert source.column(manifest, "x").tolist() == [3.0, 6.0]
