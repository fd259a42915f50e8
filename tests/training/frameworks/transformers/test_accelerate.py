"""Does a function that uses Accelerate train on two workers, and go on after a kill to the same weights?"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from penstock.training.events import Printed
from penstock.training.frameworks.ray_train.framework import RAY_TRAIN
from penstock.training.job import TrainJob
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import capture
from tests.training.digits import make_job
from tests.training.on_ray.test_trainer import Watcher

pytest.importorskip("accelerate", reason='pip install "penstock[transformers]"; `make frameworks` does')


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.shutdown()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def accelerate_job(folder: Path, run: str, until: Path) -> TrainJob:
    loop = "accelerate_loop.py:train_func"
    spec = TrainSpec(loop=loop, params={"until": str(until)}, workers=2, backend={"name": "gloo", "timeout_s": 300})
    code = capture(loop, Path(__file__).parent, spec.params)
    return replace(make_job(folder, run=run), spec=spec, code=code, open_feeds=None)


@pytest.mark.slow
def test_accelerate_on_two_workers_ends_as_undisturbed(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    listener, stop = Watcher(), threading.Event()
    whole = RAY_TRAIN.train(accelerate_job(tmp_path, "whole", tmp_path / "there"), stop=stop, listener=listener)
    assert (whole.status, whole.step, whole.restarts) == ("finished", 33, 0)
    printed = {line for event in listener.events if isinstance(event, Printed) for line in event.lines}
    assert {"processes 2 rank 0", "processes 2 rank 1"} <= printed
    done = tmp_path / "done"
    killer = Watcher(12, lambda pids: os.kill(pids[1], signal.SIGKILL), done)
    killed = RAY_TRAIN.train(accelerate_job(tmp_path, "killed", done), stop=stop, listener=killer)
    assert (killed.status, killed.restarts) == ("finished", 1) and killed.resumed_from_step is not None
    assert killed.weights_digest == whole.weights_digest
