"""How much disk does a nightly pipeline take that gets a file a day, with `retention` and without?

    python -m benchmarks.disk --folder FOLDER [--nights 60] [--out benchmarks/results]

Real runs, one a night: a file of 100 rows is added, all rows are prepared again since the scaler is fitted again, one epoch is
trained, evaluated and registered, and `retention: {keep_runs: 5}` is applied. After each night the bytes of penstock's own
storage are noted, of the source files, and of the folders of MLflow and Prefect. Without retention there would lie what was
freed, too. Nights that are noted in FOLDER are not run again. Prefect deletes events after seven days; so that nights which
follow each other at once show it, an event is old here after `EVENTS_S` seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe
from benchmarks.outcome import save
from penstock.flows.servers.prefect_server import LINGER_ENV, ServerFiles
from penstock.storage import Storage

EVENTS_S = 120
OWN = ("runs", "datasets", "units", "stages", "profiles", "pipelines", "retention")
ROWS_A_NIGHT = 100
PIPELINE = """\
name: nightly
data: {format: csv, train: data/train/, validation: {fraction: 0.2}, test: data/test.csv, label: y}
preprocess:
  - standard_scaler: {columns: [a, b, c, d]}
  - concatenator: {columns: [a, b, c, d], output: features}
train: {recipe: model.py:Net, epochs: 1, batch_rows: 64, cpus_per_worker: 0.5}
register: {name: nightly, alias: candidate}
retention: {keep_runs: 5}
"""
MODEL = """\
from torch import nn


class Net:
    def build_model(self, schema):
        return nn.Linear(4, schema.num_classes)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(self.predict(model, batch), batch["y"])

    def predict(self, model, batch):
        return model(batch["features"])
"""


def main() -> None:
    """Run the nights that are not noted yet, and write `disk.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--nights", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    file = make_project(options.folder)
    noted = options.folder / "nights.jsonl"
    while len(nights := read_nights(noted)) < options.nights:
        night = run_night(file, len(nights) + 1)
        with open(noted, "a") as handle:
            handle.write(json.dumps(night) + "\n")
        print(night, file=sys.stderr, flush=True)
    save(options.out, "disk", {"machine": describe(("prefect", "ray", "mlflow")), "keep_runs": 5, "nights": nights})


def make_project(folder: Path) -> Path:
    """The project before its first night."""
    (folder / "data" / "train").mkdir(parents=True, exist_ok=True)
    write_rows(folder / "data" / "test.csv", 0)
    (folder / "model.py").write_text(MODEL)
    file = folder / "pipeline.yaml"
    file.write_text(PIPELINE)
    return file


def write_rows(file: Path, seed: int) -> None:
    """A file of rows of its own."""
    values = np.random.default_rng(seed).normal(size=(ROWS_A_NIGHT, 4)).round(4)
    lines = [",".join([*map(str, row), str(int(sum(row) > 0))]) for row in values.tolist()]
    file.write_text("\n".join(["a,b,c,d,y", *lines, ""]))


def read_nights(noted: Path) -> list[dict[str, Any]]:
    """The nights so far."""
    return [json.loads(line) for line in noted.read_text().splitlines()] if noted.exists() else []


def run_night(file: Path, number: int) -> dict[str, Any]:
    """Add a file, run the pipeline, and note what lies on the disk."""
    state, train = Storage(str(file.parent / ".penstock")), file.parent / "data" / "train"
    write_rows(train / f"night-{number:03d}.csv", number)
    command = [sys.executable, "-m", "penstock", "run", str(file), "--json"]
    environment = {**os.environ, LINGER_ENV: "0.5", "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": f"PT{EVENTS_S}S"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return {
        "night": number,
        "source": sum(each.stat().st_size for each in train.iterdir()),
        "storage": {name: sum(state.tree(name).values()) for name in OWN},
        "mlflow": sum(state.tree("mlflow").values()),
        "prefect": prefect_bytes(file.parent / ".penstock"),
        "freed": json.loads(done.stdout.splitlines()[-1])["freed_bytes"],
    }


def prefect_bytes(state_dir: Path) -> int:
    """Of Prefect's database, once its server has ended and all of it is in one file."""
    files = ServerFiles(state_dir)
    while not files.is_free("server"):
        time.sleep(0.1)  # until the lock of another program is free
    return files.database.stat().st_size


if __name__ == "__main__":
    main()
