"""Does a function for Ray's TensorflowTrainer train on two workers by MultiWorkerMirroredStrategy, and go on after a kill?"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.training.events import Printed
from penstock.training.frameworks.loops.own_loop import installed
from penstock.training.frameworks.ray_train.framework import RAY_TRAIN
from penstock.training.job import TrainJob
from tests.guides.running import Prepared, checkpoints, prepare, reports, run_on_two
from tests.training.on_ray.test_trainer import Watcher
from tests.training.test_ray_train import cluster

if not installed("tensorflow", "tensorflow-cpu"):
    pytest.skip("TensorFlow is 600 MB; `make frameworks` installs it", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.drill]
__all__ = ["cluster"]


def line(folder: Path) -> Prepared:
    """200 points of a line with noise."""
    x = np.linspace(-1, 1, 200, dtype=np.float32)
    noise = np.random.default_rng(0).normal(0, 0.01, 200).astype(np.float32)
    return prepare(folder, {"train": pa.table({"x": x, "y": 3 * x + 1 + noise})}, label="y")


def job_of(prepared: Prepared, function: str, params: dict[str, Any], **more: Any) -> TrainJob:
    return prepared.job(f"tensorflow_loops.py:{function}", params, base=Path(__file__).parent, workers=2, **more)


def test_two_workers_learn_together_and_go_on_to_same_weights(tmp_path: Path) -> None:
    prepared, params = line(tmp_path), {"epochs": 4, "batch_size": 32}
    whole = job_of(prepared, "by_hand", params)
    ran = run_on_two(whole)
    assert ran[0].printed == ran[1].printed and len(ran[0].printed) == 4
    assert all(line.startswith("replicas 2 ") for line in ran[0].printed)
    losses = reports(whole, "loss")
    assert losses[-1] < losses[0] / 4
    for late in checkpoints(whole)[:2]:
        shutil.rmtree(whole.run_storage.local_path(f"checkpoints/{late.name}"))
    more = run_on_two(replace(whole, attempt=2))  # in processes of their own, as after a kill
    assert more[0].printed == ran[0].printed[2:] and reports(whole, "loss") == losses


@pytest.mark.usefixtures("cluster")
def test_killed_worker_of_keras_under_the_strategy_is_replaced(tmp_path: Path) -> None:
    pytest.importorskip("tf_keras", reason="Keras 3 does not learn under this strategy; `make frameworks` installs tf-keras")
    prepared, params = line(tmp_path), {"epochs": 4, "batch_size": 32}
    whole = run_on_two(job_of(prepared, "by_fit", params, run="whole"))[0].printed
    job = job_of(prepared, "by_fit", {**params, "until": str(tmp_path / "done")}, run="killed")
    step = 2 * 4  # of two epochs of four batches: both workers wait before their third
    killer = Watcher(step, lambda pids: os.kill(pids[1], signal.SIGKILL), tmp_path / "done")
    ended = RAY_TRAIN.train(job, stop=threading.Event(), listener=killer)
    assert (ended.status, ended.restarts) == ("finished", 1) and ended.resumed_from_step is not None
    assert len(reports(job, "loss")) == 4 and checkpoints(job)[0].state.epoch == 4
    printed = {text for event in killer.events if isinstance(event, Printed) for text in event.lines}
    assert {text for text in printed if text.startswith("replicas 2 ")} == set(whole) and len(set(whole)) == 4
