"""A small project that gets a file a night: breast cancer diagnoses.

The file of the second night has flipped labels, and a row without its area.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sklearn.datasets import load_breast_cancer

from tests.runs.forked import Command

__all__ = ["ADDED", "FIRST", "make_nights", "run_nights"]

FIRST, ADDED = "night1.csv", "night2.csv"

PIPELINE = """\
name: nightly
data:
  format: csv
  train: data/train/
  validation: {fraction: 0.25}
  test: data/test.csv
  label: diagnosis
  invalid: drop
preprocess:
  - standard_scaler: {columns: [mean radius, mean texture, mean area, worst concavity]}
  - label_encoder: {column: diagnosis}
  - concatenator: {columns: [mean radius, mean texture, mean area, worst concavity], output: features}
train:
  recipe: model.py:Net
  epochs: 12
  batch_rows: 32
  learning_rate: 0.01
  cpus_per_worker: 0.5
register: {name: nightly}
"""

MODEL = """\
from torch import nn


class Net:
    def build_model(self, schema):
        return nn.Linear(4, schema.num_classes)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(self.predict(model, batch), batch["diagnosis"])

    def predict(self, model, batch):
        return model(batch["features"])
"""


def make_nights(folder: Path) -> Path:
    """Write the project of the first night and return its pipeline file."""
    (folder / "data" / "train").mkdir(parents=True)
    table = _table()
    table.iloc[:250].to_csv(folder / "data" / "train" / FIRST, index=False)
    table.iloc[400:].to_csv(folder / "data" / "test.csv", index=False)
    (folder / "model.py").write_text(MODEL)
    file = folder / "pipeline.yaml"
    file.write_text(PIPELINE)
    return file


def add_flipped_night(file: Path) -> None:
    """The second night's file: its rows are as good as the others but for the last, and each has the other label."""
    table = _table().iloc[250:400].copy()
    table["diagnosis"] = table["diagnosis"].map({"benign": "malignant", "malignant": "benign"})
    added = file.parent / "data" / "train" / ADDED
    added.write_text(table.to_csv(index=False) + "14.5,19.0,,0.2,benign\n")


def run_nights(prefect_url: str, folder: Path) -> dict[str, Any]:
    """Both nights, as `penstock run --json` reports them."""
    environment = {"PREFECT_API_URL": prefect_url}  # spares each its embedded server
    file = make_nights(folder / "project")
    first = Command("run", str(file), "--json", environment=environment).finish()
    add_flipped_night(file)
    return {"first": first, "second": Command("run", str(file), "--json", environment=environment).finish()}


def _table() -> Any:
    data = load_breast_cancer(as_frame=True)
    table = data.data[["mean radius", "mean texture", "mean area", "worst concavity"]].copy()
    table["diagnosis"] = data.target.map({0: "malignant", 1: "benign"})
    return table.sample(frac=1.0, random_state=7)
