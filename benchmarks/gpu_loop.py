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

from benchmarks.cached_dataset import manifest
from benchmarks.feed_data import TABLES
from benchmarks.loop import Quiet
from benchmarks.machine import describe
from benchmarks.outcome import beside_the_first, options_parser, rows_per_s, save
from ingest.cursor import Batch
from ingest.order import make_order
from ingest.spec import ShuffleSpec
from penstock.storage import Storage
from penstock.usercode import capture
from training import reporting
from training.group import Group
from training.job import TrainJob
from training.reporting import FirstRank
from training.spec import TrainSpec
from training.state import TrainState
from training.worker import run_rank

ROWS, BATCH, WARM_STEPS, EVERY = TABLES["images"], 8192, 100, 50
NO_SAVE = {"every_s": None, "every_epoch": False}
SAVING = f"a checkpoint every {EVERY} steps"
VARIANTS: dict[str, dict[str, Any]] = {"no checkpoint": NO_SAVE, SAVING: {**NO_SAVE, "every_steps": EVERY, "keep": 1}}


def main() -> None:
    """Measure, and write `gpu_loop.json`."""
    parser = options_parser(5)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="cuda", help="another one shows that this runs, and measures nothing of use")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_loop: left out, there is no GPU here")
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
        run_rank(_job(data / ROWS.name / "penstock", Path(folder), steps, checkpoint), Group(0, 1, device), Quiet())
    return _Watched.measured


def _job(data: Path, run: Path, steps: int, checkpoint: dict[str, Any]) -> TrainJob:
    made = manifest(ROWS, data)
    order = make_order(ShuffleSpec(seed=17), ROWS.rows)
    settings = {"batch_rows": BATCH, "epochs": 1000, "max_steps": WARM_STEPS + steps + 1, "checkpoint": checkpoint}
    return TrainJob(
        run_storage=Storage(str(run)),
        data_storage=Storage(str(data)),
        manifest=made,
        order=order,
        spec=TrainSpec.model_validate({"recipe": "gpu_recipe.py:Wide", **settings}),
        seed=17,
        code=capture("gpu_recipe.py:Wide", Path(__file__).parent),
        attempt=1,
        pipeline="gpu_loop",
        identity={"data": made.content_digest, "order": order.fingerprint, "batch_rows": str(BATCH)},
    )


if __name__ == "__main__":
    main()
