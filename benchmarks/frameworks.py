"""What comes of the same prepared rows under each framework, how long does it learn, and what does the user write for it?

    python -m benchmarks.frameworks [--rounds 3] [--retail ../shared/data/online_retail/parquet] [--out benchmarks/results]

Two tasks: which tumours are malignant (scikit-learn's breast cancer: 569 rows, 30 columns), and which lines of a shop's
invoices are cancellations (Online Retail, see examples/online_retail: trained on the lines before August 2011, validated on
those of August, tested on those after). Every framework has one worker with two cores and the same columns; nothing is tuned.
The networks are the same: one hidden layer, AdamW. Keras computes with TensorFlow where it is on the path (`make frameworks`
puts it into `.venv/frameworks`), else with torch. Seconds are those from the first step on record to the last, with validation
and checkpoints in between, and those of the whole stage, which a framework's start is part of. The lines are those of the
model's file and of `train:`, without empty ones.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_breast_cancer

from benchmarks.machine import describe
from benchmarks.outcome import learning_times, options_parser, save
from tests.drills.project import Command


class Task(NamedTuple):
    """A pipeline up to its `train:`, and what the frameworks' words for the length of a training are."""

    spec: str
    epochs: int
    trees: int
    batch_rows: int


TASKS = {
    "tumours": Task(
        """\
data:
  format: parquet
  train: rows/
  validation: {fraction: 0.15, by: row}
  test: {fraction: 0.2, by: row}
  label: label
preprocess:
  - standard_scaler: {columns: "*"}
  - concatenator: {columns: "*", output: features}
""",
        epochs=30,
        trees=200,
        batch_rows=32,
    ),
    "cancelled": Task(
        """\
data:
  format: parquet
  train: rows/
  validation: {by: InvoiceDate, after: 2011-08-01, before: 2011-09-01}
  test: {by: InvoiceDate, after: 2011-09-01}
  label: label
  invalid: drop
preprocess:
  - map_batches: lines.py:describe_line
  - one_hot: {columns: [country], max_categories: 12}
  - standard_scaler: {columns: [price, quantity, hour, weekday]}
  - concatenator: {columns: [price, quantity, hour, weekday, known_customer, country, words], output: features}
""",
        epochs=3,
        trees=200,
        batch_rows=512,
    ),
}

LINES = """\
import re
import zlib

import numpy as np


def describe_line(batch):
    price, minutes = batch["UnitPrice"].astype(float), batch["InvoiceDate"].astype("datetime64[m]").astype(np.int64)
    words = np.zeros((len(price), 64), np.float32)
    for row, text in enumerate(batch["Description"]):
        for word in re.findall("[a-z]+", (text or "").lower()):
            words[row, zlib.crc32(word.encode()) % 64] += 1
    return {
        "label": np.array([str(number).startswith("C") for number in batch["InvoiceNo"]], dtype=np.int64),
        "price": np.log1p(price.clip(min=0)),
        "quantity": np.log1p(np.abs(batch["Quantity"].astype(float))),  # its sign would give the answer away
        "hour": (minutes // 60 % 24).astype(float),
        "weekday": ((minutes // (60 * 24) + 3) % 7).astype(float),
        "known_customer": (~np.isnan(batch["CustomerID"].astype(float))).astype(np.float32),
        "country": batch["Country"],
        "words": words,
        "_keep": price > 0,
    }
"""

RECIPE = """\
from torch import nn


class Model:
    def build_model(self, schema):
        (columns,) = schema["features"].shape
        return nn.Sequential(nn.Linear(columns, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, schema.num_classes))

    def loss(self, model, batch):
        return nn.functional.cross_entropy(self.predict(model, batch), batch["label"])

    def predict(self, model, batch):
        return model(batch["features"].float())
"""

LIGHTNING = """\
import pytorch_lightning as pl
import torch
from torch import nn


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))

    def forward(self, batch):
        return self.layers(batch["features"].float())

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch), batch["label"])

    def validation_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch), batch["label"])
        self.log("val/loss", loss, sync_dist=True, batch_size=len(batch["label"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.003)
"""

KERAS = """\
import keras
from keras import layers


def model(schema):
    net = keras.Sequential([keras.Input(schema["features"].shape), layers.Dense(64, activation="relu"), layers.Dropout(0.2),
                            layers.Dense(schema.num_classes, activation="softmax")])
    net.compile(keras.optimizers.AdamW(0.003), "sparse_categorical_crossentropy")
    return net
"""


class Way(NamedTuple):
    """How a user says it: the model's file, and `train:` without the words that all have in common."""

    code: str
    train: str


NETWORK = "  epochs: {epochs}\n  batch_rows: {batch_rows}\n"
TREES = "  epochs: {trees}\n"
WAYS = {
    "torch recipe": Way(RECIPE, "  recipe: model.py:Model\n  learning_rate: 0.003\n" + NETWORK),
    "lightning": Way(LIGHTNING, "  framework: lightning\n  recipe: model.py:Model\n" + NETWORK),
    "keras": Way(KERAS, "  framework: keras\n  recipe: model.py:model\n" + NETWORK),
    "xgboost": Way("", "  framework: xgboost\n  params: {{max_depth: 6, eta: 0.1}}\n" + TREES),
    "lightgbm": Way("", "  framework: lightgbm\n  params: {{num_leaves: 31, learning_rate: 0.1}}\n" + TREES),
}
COMMON = "  cpus_per_worker: 2\n  checkpoint: {best: {metric: val/loss, mode: min}}\n"
AFTER = "shuffle: {seed: 17}\nevaluate: {metrics: [accuracy, auroc]}\n"


def main() -> None:
    """Measure, and write `frameworks.json`."""
    parser = options_parser(3)
    parser.add_argument("--retail", type=Path, help="folder of Online Retail's Parquet files; without it a task is left out")
    options = parser.parse_args()
    tasks = {name: task for name, task in TASKS.items() if name != "cancelled" or options.retail}
    found: dict[str, dict[str, Any]] = {task: {way: [] for way in WAYS} for task in tasks}
    for number in range(options.rounds):
        for name, task in tasks.items():
            with tempfile.TemporaryDirectory() as folder:
                _rows(name, Path(folder), options.retail)
                for way in WAYS:
                    one = _train(Path(folder), name, task, way)
                    found[name][way].append(one)
                    print(f"frameworks round {number + 1} {name:<10} {way:<13} {one}", file=sys.stderr, flush=True)
    machine = describe(
        (
            "penstock",
            "torch",
            "lightning",
            "pytorch-lightning",
            "keras",
            "tensorflow-cpu",
            "xgboost",
            "xgboost-cpu",
            "lightgbm",
            "ray",
        )
    )
    result = {name: {way: _together(rounds, tasks[name], way) for way, rounds in ways.items()} for name, ways in found.items()}
    save(options.out, "frameworks", {"machine": machine, "rounds": options.rounds, "tasks": result})


def _rows(name: str, folder: Path, retail: Path | None) -> None:
    if name == "cancelled":
        assert retail is not None
        (folder / "rows").symlink_to(retail.resolve())
        (folder / "lines.py").write_text(LINES)
        return
    (folder / "rows").mkdir()
    data = load_breast_cancer()
    columns = {name: data.data[:, place] for place, name in enumerate(data.feature_names)}
    pq.write_table(pa.table({**columns, "label": data.target.astype("int64")}), folder / "rows" / "part.parquet")


def _train(folder: Path, name: str, task: Task, way: str) -> dict[str, float]:
    """Metrics of the test split, and seconds. The rows that one framework has had prepared are reused by the next."""
    (folder / "model.py").write_text(WAYS[way].code)
    file = folder / "pipeline.yaml"
    train = WAYS[way].train.format(**task._asdict())
    file.write_text(f"name: {name}\nstorage: .penstock\n{task.spec}train:\n{train}{COMMON}{AFTER}")
    result = Command("run", str(file), "--json").finish(timeout_s=1800)
    ends = learning_times(folder, result)
    stage = next(one["seconds"] for one in result["stages"] if one["name"] == "train")
    metrics = result["metrics"]
    seconds = ends[max(ends)] - ends[min(ends)]
    return {"seconds": seconds, "stage_s": stage, "auroc": metrics["test/auroc"], "accuracy": metrics["test/accuracy"]}


def _together(rounds: list[dict[str, float]], task: Task, way: str) -> dict[str, Any]:
    texts = (WAYS[way].code, WAYS[way].train.format(**task._asdict()) + COMMON)
    lines = sum(bool(line.strip()) for text in texts for line in text.splitlines())
    return {**{key: statistics.median(one[key] for one in rounds) for key in rounds[0]}, "lines": lines, "rounds": rounds}


if __name__ == "__main__":
    main()
