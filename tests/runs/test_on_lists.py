"""A pipeline whose rows differ in length, from the command to the registered model: lists, encoded images, missing values."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from penstock.errors import PenstockError
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.check import check_pipeline
from tests.runs.forked import Command
from tests.runs.killed import START_S
from tests.runs.raw_scores import check_raw_rows

PIPELINE = """\
name: lists
data: {format: parquet, train: data/, validation: {fraction: 0.2}, test: {fraction: 0.1}, label: label}
preprocess:
  - ragged: {columns: [tokens], pad_value: 9}
  - ragged: {columns: [marks], batch: packed}
  - decode_image: {column: picture, keep: encoded}
  - imputer: {columns: [age], strategy: constant, fill_value: -1}
shuffle: {seed: 5, by_length: {column: tokens, pool_batches: 4, batch_entries: 400}}
train:
  recipe: model.py:Reader
  epochs: 4
  batch_rows: 64
  cpus_per_worker: 0.5
  accumulate: 2
  checkpoint: {every_steps: 10}
"""

MODEL = """\
import os
import time

import torch
from torch import nn


class Reader:
    def build_model(self, schema):
        assert schema["tokens"].ragged == "padded" and schema["marks"].ragged == "packed"
        return Network(schema.num_classes)

    def loss(self, model, batch):
        time.sleep(float(os.environ.get("LISTS_PAUSE_S", "0")))  # else all steps are over before a signal comes
        assert batch["tokens"].numel() <= 400
        return nn.functional.cross_entropy(self.predict(model, batch), batch["label"])

    def predict(self, model, batch):
        return model(batch)

    def augment(self, batch, generator):
        batch["age"] = batch["age"] + 0.01 * generator.normal().float()
        return batch


class Network(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.embed = nn.EmbeddingBag(10, 16, mode="sum", padding_idx=9)
        self.mark = nn.EmbeddingBag(2, 8, mode="sum")
        self.head = nn.Sequential(nn.Linear(16 + 8 + 3 + 2, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, classes))

    def forward(self, batch):
        words = self.embed(batch["tokens"].long()) / batch["tokens_length"][:, None].clamp(min=1)
        marks = self.mark(batch["marks"].long(), batch["marks_offsets"][:-1])
        colour = batch["picture"].float().mean((1, 2)) / 255
        ages = torch.stack([batch["age"].float(), (batch["age"] < 0).float()], 1)
        return self.head(torch.cat([words, marks, colour, ages], 1))
"""


def make_project(folder: Path) -> Path:
    """1,200 rows whose class shows in their tokens: class c prefers token c."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(1200):
        label = number % 4
        length = int(rng.integers(0, 20))
        stream = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(stream, "JPEG")
        rows.append(
            {
                "tokens": np.where(rng.random(length) < 0.6, label, rng.integers(0, 8, length)).tolist(),
                "marks": rng.integers(0, 2, number % 3).tolist(),
                "picture": {"bytes": stream.getvalue()},
                "age": None if number % 5 == 0 else float(number % 7),
                "label": label,
            }
        )
    (folder / "data").mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    for part in range(3):
        pq.write_table(table.slice(part * 400, 400), folder / "data" / f"{part}.parquet")
    (folder / "model.py").write_text(MODEL)
    file = folder / "pipeline.yaml"
    file.write_text(PIPELINE)
    return file


@pytest.mark.drill
@pytest.mark.usefixtures("shared_prefect")
def test_a_stopped_run_ends_with_the_same_weights_and_its_model_answers(tmp_path: Path) -> None:
    straight = Command("run", str(make_project(tmp_path / "straight")), "--json").finish()
    assert straight["status"] == "done"
    assert straight["metrics"]["test/accuracy"] > 0.6, "one guess in four is right by chance"
    check_raw_rows(tmp_path / "straight" / "pipeline.yaml", straight)

    file = make_project(tmp_path / "stopped")
    in_memory = ("--set", "materialize.cache=memory")  # as a cache on disk, but for what a second command prepares again
    command = Command("run", str(file), "--json", *in_memory, environment={"LISTS_PAUSE_S": "0.05"})
    checkpoints = (file.parent / ".penstock").glob
    command.wait_for("a checkpoint", lambda: any(checkpoints("runs/*/checkpoints/*/manifest.json")), START_S)
    command.process.send_signal(signal.SIGTERM)
    stopped = command.finish(code=143)
    assert stopped["status"] == "interrupted"
    finished = Command("run", str(file), "--json", *in_memory).finish()
    assert finished["exactness"] == "bit-exact"
    assert finished["weights_digest"] == straight["weights_digest"]
    assert finished["metrics"] == straight["metrics"]

    script = (
        "import mlflow; m = mlflow.pyfunc.load_model('models:/lists@candidate'); e = m.input_example\n"
        "a = m.predict(e)\n"
        "print(len(a), len(e), sorted(e), a.probability.between(0.25, 1).all())\n"
    )
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{file.parent}/.penstock/mlflow/mlflow.db"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rows, known, *rest = done.stdout.split(maxsplit=2)
    assert rows == known
    assert "['age', 'marks', 'picture', 'tokens'] True" in rest[0]


@pytest.mark.drill
@pytest.mark.usefixtures("shared_prefect")
def test_rows_that_no_disk_keeps_come_to_the_same_weights_whichever_way(tmp_path: Path) -> None:
    results = []
    for cache in ("memory", "none"):
        file = make_project(tmp_path / cache)
        changes = (f"materialize.cache={cache}", "shuffle.mode=none", "train.epochs=1")
        options = [word for change in changes for word in ("--set", change)]
        results.append(Command("run", str(file), *options, "--json").finish())
        kept = (file.parent / ".penstock").rglob("*.arrow")
        assert {found.parent.name for found in kept} <= {"answers"}, "what the model answered is kept, and no prepared row"
    in_memory, streamed = results
    assert in_memory["status"] == streamed["status"] == "done"
    assert in_memory["model_uri"] == streamed["model_uri"] == "models:/lists/1"
    assert in_memory["weights_digest"] == streamed["weights_digest"]
    assert in_memory["metrics"] == streamed["metrics"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("preprocess=[]", ["shuffle.by_length", "the transform `ragged` makes them"]),
        ("train.last_batch=drop", ["train.last_batch", "steps by length"]),
        ("train.compile=true", ["train.compile", "another kernel"]),
        (
            "preprocess=[{ragged: {columns: [tokens]}}, {map_batches: model.py:Reader}]",
            ["preprocess.1.map_batches", "undo ragged (entry 0)"],
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(tmp_path: Path, change: str, words: list[str]) -> None:
    with pytest.raises(PenstockError) as refused:
        check_pipeline(load_spec(make_project(tmp_path / "project"), [change]), report=lambda line: None)
    assert refused.value.exit_code == 2
    for word in words:
        assert word in str(refused.value)
