"""`materialize.overlap: true`: training begins before the last unit is prepared, and a kill in both stages costs no bit."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.runs.forked import Command

pytestmark = pytest.mark.drill

FILES, ROWS = 8, 60

PIPELINE = """\
name: early
data: {format: parquet, train: train/, validation: validation/, label: y}
preprocess:
  - standard_scaler: {columns: [x]}
  - label_encoder
  - map_batches: transforms.py:held
materialize: {unit_bytes: 1, overlap: true}
shuffle: {mode: windowed, window_of: shards, window_rows: 120, lanes: 1, seed: 5}
train:
  recipe: model.py:Net
  epochs: 2
  batch_rows: 10
  cpus_per_worker: 0.5
  checkpoint: {every_steps: 2}
"""

TRANSFORMS = """\
import os
import time
from pathlib import Path

HERE = Path(os.environ["EARLY_SEEN"])


def held(batch):
    (HERE / f"unit-{int(batch['unit'][0])}").touch()
    made = len(list(HERE.glob("unit-*")))
    for limit, step in ((5, 4), (7, 14)):  # a check before the run has made two steps
        while made > limit and not (HERE / f"step-{step}").exists() and not (HERE / "free").exists():
            time.sleep(0.02)
    return batch
"""

MODEL = """\
import os
import time
from pathlib import Path

import torch
from torch import nn

HERE = Path(os.environ["EARLY_SEEN"])


class Net:
    def __init__(self, stops_at=0):
        self.stops_at = stops_at

    def build_model(self, schema):
        return nn.Sequential(nn.Linear(1, 16), nn.Dropout(0.3), nn.Linear(16, schema.num_classes))

    def loss(self, model, batch):
        step = len(list(HERE.glob("step-*"))) + 1
        (HERE / f"step-{step}").touch()
        while step == self.stops_at and not (HERE / "go").exists():
            time.sleep(0.05)  # until the kill
        return nn.functional.cross_entropy(self.predict(model, batch), batch["y"])

    def predict(self, model, batch):
        return model(batch["x"][:, None].float())
"""


def make_project(folder: Path) -> Path:
    rng = np.random.default_rng(3)
    for split, files in (("train", FILES), ("validation", 1)):
        (folder / split).mkdir(parents=True)
        for unit in range(files):
            x = rng.normal(size=ROWS)
            table = {"x": x, "unit": np.full(ROWS, unit + 100 * (split != "train")), "y": np.where(x > 0, "up", "down")}
            pq.write_table(pa.table(table), folder / split / f"part-{unit}.parquet")
    (folder / "seen").mkdir()
    (folder / "model.py").write_text(MODEL)
    (folder / "transforms.py").write_text(TRANSFORMS)
    file = folder / "pipeline.yaml"
    file.write_text(PIPELINE)
    return file


def run(file: Path, *settings: str) -> Command:
    words = (word for setting in settings for word in ("--set", setting))
    return Command("run", str(file), "--json", *words, environment={"EARLY_SEEN": str(file.parent / "seen")})


def stages(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {stage["name"]: stage for stage in result["stages"]}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run whose last units wait for steps of training, and its result."""
    file = make_project(tmp_path_factory.mktemp("calm"))
    return file, run(file).finish()


def test_training_begins_before_the_last_unit(calm: tuple[Path, dict[str, Any]]) -> None:
    found = stages(calm[1])
    assert {stage["outcome"] for stage in found.values()} == {"ran"}
    assert calm[1]["exactness"] == "bit-exact"
    (record,) = (calm[0].parent / ".penstock" / "stages" / "materialize").glob("*.json")
    output = json.loads(record.read_text())["output"]
    assert output["rows"] == {"train": FILES * ROWS, "validation": ROWS, "test": 0}
    ends = datetime.fromisoformat(found["materialize"]["began"]) + timedelta(seconds=found["materialize"]["seconds"])
    assert datetime.fromisoformat(found["train"]["began"]) < ends
    again = run(calm[0]).finish()
    assert {stage["outcome"] for stage in again["stages"]} == {"reused"}


def test_weights_equal_those_without_overlap(calm: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    file = make_project(tmp_path)
    (tmp_path / "seen" / "free").touch()
    plain = run(file, "materialize.overlap=false").finish()
    assert plain["weights_digest"] == calm[1]["weights_digest"]
    assert plain["metrics"] == calm[1]["metrics"]


def test_kill_in_both_stages_continues_to_the_same_weights(calm: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    file = make_project(tmp_path)
    state, seen = tmp_path / ".penstock", tmp_path / "seen"
    command = run(file, "train.params={stops_at: 9}")
    command.wait_for("a checkpoint", lambda: list(state.glob("runs/*/checkpoints/step-*6-*/manifest.json")))
    command.kill()
    units = set(state.glob("units/*/unit.json"))
    assert 4 <= len(units) <= 7 < FILES + 1  # units 6 and 7 waited for step 14
    assert not list(state.glob("stages/materialize/*.json")) and not list(state.glob("datasets/*/manifest.json"))
    inodes = {unit: unit.stat().st_ino for unit in units}
    (seen / "go").touch()
    result = run(file, "train.params={stops_at: 9}").finish()
    assert inodes == {unit: unit.stat().st_ino for unit in units}  # none was made again
    assert stages(result)["materialize"]["outcome"] == "ran"
    assert stages(result)["train"]["outcome"] == "resumed"
    assert result["exactness"] == "bit-exact"
    assert result["weights_digest"] == calm[1]["weights_digest"]
    assert result["metrics"] == calm[1]["metrics"]


def test_changed_rows_of_an_unfinished_run_are_refused_and_the_former_ones_end_it(tmp_path: Path) -> None:
    file, state, label = make_project(tmp_path), tmp_path / ".penstock", "data.label=x"  # of floats
    settings = (label, "train.params={stops_at: 9}", "preprocess=[{drop: [y]}, {map_batches: 'transforms.py:held'}]")
    (tmp_path / "model.py").write_text(
        MODEL.replace("schema.num_classes", "1")
        .replace("cross_entropy", "mse_loss")
        .replace('batch["y"]', 'batch["x"][:, None]')
        .replace('batch["x"][:, None].float()', 'batch["unit"][:, None].float()')
    )
    command = run(file, *settings)
    command.wait_for("a checkpoint", lambda: list(state.glob("runs/*/checkpoints/step-*6-*/manifest.json")))
    command.kill()
    for name in ("go", "free"):
        (tmp_path / "seen" / name).touch()
    refused = run(file, *settings, "materialize.shard_bytes=200").finish(code=6)
    assert "materialize.shard_bytes" in str(refused["error"])
    result = run(file, *settings).finish()
    assert stages(result)["train"]["outcome"] == "resumed"


def test_failed_unit_ends_the_run_with_its_error(tmp_path: Path) -> None:
    file = make_project(tmp_path)
    pq.write_table(pa.table({"x": [1.0, None], "unit": [50, 50], "y": ["up", "up"]}), tmp_path / "train" / "part-9.parquet")
    failed = run(file, "preprocess=[label_encoder, {map_batches: 'transforms.py:held'}]").finish(code=4)
    assert "part-9.parquet" in failed["error"]["message"] + str(failed["error"])
    assert (tmp_path / "seen" / "step-4").exists()
    (record,) = (tmp_path / ".penstock" / "runs").glob("*/attempts/*.json")
    assert [stage["outcome"] for stage in json.loads(record.read_text())["stages"]][2] == "begun"
