"""What does a checkpoint cost a GPU that trains?

    python -m benchmarks.gpu_loop [--rounds 5] [--steps 500] [--device cuda] [--out benchmarks/results]

penstock's own loop trains a network of 23 million weights on shuffled batches of 8,192 images, with and without a checkpoint
every 50 steps: 275 MB each, the weights and AdamW's averages. What is counted is the time of `steps` steps after the first 100,
the GPU's work on them included. Without a GPU there is nothing to measure, and nothing is written.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu import gpu_options
from benchmarks.loaders.cached_dataset import manifest
from benchmarks.loaders.feed_data import TABLES
from benchmarks.loop import Quiet, train_job
from benchmarks.machine import describe
from benchmarks.outcome import beside_the_first, rows_per_s, save
from penstock.ingest.feed.batch import Batch
from penstock.training.loop import observer as reporting
from penstock.training.loop.observer import FirstRank
from penstock.training.on_ray.worker import run_rank
from penstock.training.ranks import Group
from penstock.training.state import TrainState

ROWS, BATCH, WARM_STEPS, EVERY = TABLES["images"], 8192, 100, 50
NO_SAVE = {"every_s": None, "every_epoch": False}
SAVING = f"a checkpoint every {EVERY} steps"
VARIANTS: dict[str, dict[str, Any]] = {"no checkpoint": NO_SAVE, SAVING: {**NO_SAVE, "every_steps": EVERY, "keep": 1}}


def main() -> None:
    """Measure, and write `gpu_loop.json`."""
    options = gpu_options("gpu_loop")
    if options is None:
        return
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    manifest(ROWS, options.data / ROWS.name / "penstock")
    _measure(NO_SAVE, options.data, device, EVERY)  # loads CUDA's libraries
    stalls: list[float] = []

    def measure(name: str) -> float:
        watch = _measure(VARIANTS[name], options.data, device, options.steps)
        stalls.extend(watch.saves_s[1:])  # the first one pins memory
        return options.steps * BATCH / watch.steps_s

    found = rows_per_s("gpu_loop", VARIANTS, options.rounds, measure)
    variants = beside_the_first(found, "rows_per_s")
    result = {
        "machine": describe(("numpy", "torch", "ray")),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "rounds": options.rounds,
        "steps": options.steps,
        "batch_rows": BATCH,
        "every": EVERY,
        "save_ms": 1000 * statistics.median(stalls),
        "checkpoint_percent": 100 * (1 / variants[SAVING]["of_by_hand"] - 1),
        "variants": variants,
    }
    save(options.out, "gpu_loop", result)


class _Watched(FirstRank):
    """Rank 0's observer, with a watch.

    Attributes:
        steps_s: from the batch after `WARM_STEPS` steps to the last one.
        saves_s: how long each save held the training thread between them.
    """

    measured: _Watched
    """The one made last."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _Watched.measured = self
        self.steps_s, self.saves_s = 0.0, list[float]()
        self._steps = self._job.spec.max_steps or 0
        self._began_s = 0.0

    def batch(self, step: int, epoch: int, batch: Batch) -> None:
        """Read the watch, once the GPU has done what it was asked."""
        if step in (WARM_STEPS, self._steps - 1):
            if batch.columns["x"].is_cuda:
                torch.cuda.synchronize()
            now_s = time.perf_counter()
            self.steps_s, self._began_s = now_s - self._began_s, now_s
        super().batch(step, epoch, batch)

    def save(self, state: TrainState, measured: dict[str, float]) -> None:
        """As any, timed."""
        began_s = time.perf_counter()
        super().save(state, measured)
        if WARM_STEPS < state.step < self._steps:
            self.saves_s.append(time.perf_counter() - began_s)


def _measure(checkpoint: dict[str, Any], data: Path, device: torch.device, steps: int) -> _Watched:
    with tempfile.TemporaryDirectory(dir=data) as folder, mock.patch.object(reporting, "FirstRank", _Watched):
        settings = {"batch_rows": BATCH, "max_steps": WARM_STEPS + steps + 1, "checkpoint": checkpoint}
        job = train_job(ROWS, "gpu_recipe.py:Wide", data / ROWS.name / "penstock", Path(folder), **settings)
        run_rank(job, Group(0, 1, device), Quiet())
    return _Watched.measured


if __name__ == "__main__":
    main()
