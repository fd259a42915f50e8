"""Much data is looked through and dealt by class on the cluster, and what is found is what one process finds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest

from penstock.errors import DataError
from penstock.ingest.ray_tasks import ray_map
from penstock.ingest.read.snapshot import SourceSnapshot
from penstock.ingest.spec import DataSpec, MaterializeSpec
from penstock.progress import silent
from penstock.tasks.prepare import READ as STAGE
from tests.ingest.reading import listed

pytestmark = [pytest.mark.drill, pytest.mark.slow]


def read_by_stage(data: DataSpec, folder: Path) -> tuple[SourceSnapshot, bool]:
    """What the read stage finds, and whether it has asked for a cluster."""
    asked: list[bool] = []
    ctx: Any = SimpleNamespace(
        project=SimpleNamespace(source=data, files=listed(data, folder), spec=SimpleNamespace(materialize=MaterializeSpec())),
        reporter=SimpleNamespace(progress=lambda stage: silent),
        need_ray=lambda: asked.append(True),
        parallel=lambda _stage: ray_map,
    )
    return SourceSnapshot.model_validate(STAGE.run(ctx)[0]), bool(asked)


def test_the_cluster_finds_what_one_process_finds(tmp_path: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, rows in enumerate((20_000, 500, 700)):
        table = pa.table(
            {"id": range(rows), "text": [f"a, {part}\n{row}" for row in range(rows)], "y": [row % 7 for row in range(rows)]}
        )
        pyarrow.csv.write_csv(table, tmp_path / f"{part}.csv")
    data = DataSpec.model_validate({"format": "csv", "train": ".", "validation": {"fraction": 0.25, "stratify": "y"}})
    here, asked = read_by_stage(data, tmp_path)
    assert not asked and all(file.strata for file in here.files)
    monkeypatch.setattr("penstock.ingest.read.inspection.MUCH_BYTES", 1)
    on_cluster, asked = read_by_stage(data, tmp_path)
    assert asked and on_cluster == here
    (tmp_path / "3.csv").write_bytes(b"id,text,y\n\x00")
    with pytest.raises(DataError, match=r"3\.csv") as found:
        read_by_stage(data, tmp_path)
    monkeypatch.setattr("penstock.ingest.read.inspection.MUCH_BYTES", 1 << 60)
    with pytest.raises(DataError) as alone:
        read_by_stage(data, tmp_path)
    assert str(found.value) == str(alone.value)
