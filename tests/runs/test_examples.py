"""Do the examples that make their own data run, in a small size, and does the model of each answer from the registry?"""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import penstock
from tests import ROOT
from tests.runs.forked import Command

pytestmark = [pytest.mark.slow, pytest.mark.drill, pytest.mark.usefixtures("shared_prefect")]


def test_detection_finds_digits_and_answers_with_boxes(tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "examples" / "detection", tmp_path / "detection")
    made = runpy.run_path(str(folder / "make_data.py"))
    made["write"](folder / "data" / "train", 600, np.arange(1500), 0)
    made["write"](folder / "data" / "test", 60, np.arange(1500, 1797), 1)
    ended = Command("run", str(folder / "pipeline.yaml"), "--json").finish()
    assert (ended["status"], ended["exactness"]) == ("done", "bit-exact")
    assert ended["metrics"]["test/recall"] > 0.3 and {"test/box", "test/class", "test/objectness"} <= ended["metrics"].keys()
    model = penstock.load_model("models:/digit-finder@candidate", f"sqlite:///{folder}/.penstock/mlflow/mlflow.db")
    rows = pq.read_table(folder / "data" / "test").slice(0, 20)
    answers = model.predict(rows.select(["image"])).prediction
    assert len({len(boxes) for boxes in answers}) > 1 and all(len(box) == 6 for boxes in answers for box in boxes)
    found = sum(len(boxes) for boxes in answers)
    assert 0.5 < found / sum(map(len, rows["boxes"].to_pylist())) < 1.5
