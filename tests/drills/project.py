"""A small real project for the drills: handwritten digits in several files, a network with dropout."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_digits

__all__ = ["DAY", "Command", "make_project"]

DAY = int(os.environ.get("PENSTOCK_DRILL_DAY") or date.today().toordinal())
"""Decides what drills try that have more cases than an hour has room for."""

PIPELINE = """\
name: drill
data:
  format: parquet
  train: data/train/
  validation: {{fraction: 0.2}}
  label: label
preprocess:
  - standard_scaler: {{columns: [mean]}}
  - map_batches: transforms.py:scale
materialize: {{unit_bytes: 1}}
shuffle: {{seed: 5}}
train:
  recipe: model.py:Net
  epochs: {epochs}
  batch_rows: 64
  workers: {workers}
  cpus_per_worker: 0.5
  checkpoint: {{every_steps: 5, every_s: 1}}
  retries: 5
register: {{name: drill}}
"""

MODEL = """\
import itertools
import os
import time
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent


class Net:
    def __init__(self, pause_s: float = 0.0):
        self.pause_s = pause_s
        self.next_answer = itertools.count(1).__next__  # a count that no weight depends on is kept out of sight

    def build_model(self, schema):
        return nn.Sequential(nn.Linear(65, int((HERE / "width.txt").read_text())), nn.ReLU(), nn.Dropout(0.3),
                             nn.Linear(32, schema.num_classes))

    def loss(self, model, batch):
        # Else all steps are over before a kill comes.
        time.sleep(self.pause_s or float(os.environ.get("DRILL_PAUSE_S", "0")))
        smoothing = float((HERE / "smoothing.txt").read_text())
        return nn.functional.cross_entropy(self.predict(model, batch), batch["label"], label_smoothing=smoothing)

    def predict(self, model, batch):
        answer = str(self.next_answer())
        while os.environ.get("DRILL_HELD_AT") == answer: time.sleep(1)  # until the kill
        return model(torch.cat([batch["image"], batch["mean"][:, None]], dim=1))
"""

TRANSFORMS = """\
import numpy as np


def scale(batch):
    batch["image"] = np.stack(batch["image"]).astype(np.float32) / 16
    return batch
"""


def make_project(folder: Path, *, epochs: int = 6, files: int = 6, workers: int = 1) -> Path:
    """Write the project into `folder` and return its pipeline file.

    Args:
        workers: more than one costs twice the CPU: Ray Train's controller, and a process for each.
    """
    digits = load_digits()
    (folder / "data" / "train").mkdir(parents=True)
    size = len(digits.data) // files + 1
    for index in range(files):
        part = slice(index * size, (index + 1) * size)
        images = digits.data[part].astype("uint8")
        table = pa.table(
            {
                "image": pa.FixedSizeListArray.from_arrays(pa.array(images.reshape(-1)), 64),
                "mean": images.mean(axis=1).astype("float32"),
                "label": digits.target[part].astype("int64"),
            }
        )
        pq.write_table(table, folder / "data" / "train" / f"part-{index}.parquet")
    (folder / "model.py").write_text(MODEL)
    (folder / "width.txt").write_text("32")
    (folder / "smoothing.txt").write_text("0")
    (folder / "transforms.py").write_text(TRANSFORMS)
    file = folder / "pipeline.yaml"
    file.write_text(PIPELINE.format(epochs=epochs, workers=workers))
    return file


def file_to_add_to() -> IO[str]:
    """A file without a name. What a process writes goes to its end, however far this one has read."""
    file = tempfile.TemporaryFile("w+")  # noqa: SIM115
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    return file


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


class Command:
    """One `penstock` process, in a session of its own so that it can be signalled like a user's.

    Args:
        before: words before it, such as those that put it on another machine.
    """

    def __init__(self, *words: str, environment: Mapping[str, str] | None = None, before: Sequence[str] = ()) -> None:
        self.words = words
        # A file, because a pipe that nobody reads would stop the process when it is full.
        self._said = file_to_add_to()
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "penstock", *words],
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        # A test that fails or is interrupted must not leave it running.
        weakref.finalize(self, _end, self.process)

    @property
    def said(self) -> str:
        """What it has written to stderr so far."""
        self._said.seek(0)
        return self._said.read()

    def wait_for(self, what: str, seen: Callable[[], Any], timeout_s: float = 600, every_s: float = 0.05) -> None:
        """Poll until `seen`; the process ending before that is a failure."""
        deadline = time.monotonic() + timeout_s
        while not seen():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.said[-4000:]}"
            assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s:\n{self.said[-4000:]}"
            time.sleep(every_s)  # the run does not know that it is watched: its files are all there is to look at

    def kill(self) -> None:
        """SIGKILL the process alone, as the kernel's out-of-memory killer does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def finish(self, code: int = 0, timeout_s: float = 600) -> dict[str, Any]:
        """Wait, demand the exit code, and return the JSON object of the last line."""
        out, _ = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == code, f"{' '.join(self.words)} exited {self.process.returncode}:\n{self.said[-6000:]}"
        return json.loads(out.strip().splitlines()[-1])  # type: ignore[no-any-return]
