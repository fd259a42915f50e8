"""Is training on a GPU continued to the same bits, and saved as it was, while the GPU is still at work?"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.storage import Storage
from penstock.training.checkpoint.packed import unpack
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.job import TrainJob
from penstock.training.on_ray.worker import RankResult, run_rank
from penstock.training.ranks import Group
from penstock.training.recipe import load_recipe
from penstock.training.step.learner import Learner
from tests.training.digits import CPU, SCHEMA, ListClient, make_job, train_alone

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")


def train_in_a_process(job: TrainJob) -> RankResult:
    """Train on the GPU in a process of its own, as Ray's worker would: nothing of an attempt before is left."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(train_here, (job,))


def train_here(job: TrainJob) -> RankResult:
    """Train on the GPU in this process."""
    return run_rank(job, Group(0, 1, GPU), ListClient())


def digest(folder: Path, run: str) -> str:
    checkpoint, _ = CheckpointStore(Storage(str(folder / run))).newest_valid()
    assert checkpoint is not None
    return checkpoint.manifest.weights_digest


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        {"recipe": "Digits"},
        {"recipe": "Scheduled", "precision": "bf16", "accumulate": 3},
        {"recipe": "Digits", "precision": "fp16", "clip_norm": 1.0},
        {"recipe": "Digits", "compile": True},
    ],
    ids=lambda spec: "-".join(map(str, spec.values())),
)
def test_two_stops_on_a_gpu_change_no_weights(tmp_path: Path, spec: dict[str, Any]) -> None:
    whole = train_in_a_process(make_job(tmp_path, run="whole", **spec))
    assert whole.status == "finished"
    for attempt, max_steps in enumerate([3, 9, None], start=1):
        result = train_in_a_process(make_job(tmp_path, run="parts", attempt=attempt, max_steps=max_steps, **spec))
    assert (result.state, result.exactness, result.resumed_from_step) == (whole.state, "bit-exact", 9)
    assert digest(tmp_path, "parts") == digest(tmp_path, "whole")


def test_other_kind_of_device_continues_as_same_order(tmp_path: Path) -> None:
    train_here(make_job(tmp_path, max_steps=3))
    result = train_alone(make_job(tmp_path, attempt=2))
    assert result.status == "finished"
    assert result.exactness.startswith("same-order: device NVIDIA")
    assert " -> cpu" in result.exactness


def test_save_holds_the_state_of_its_call(tmp_path: Path) -> None:
    job = make_job(tmp_path, params={"hidden": 2000})
    recipe = load_recipe(job.code, job.spec.params)
    learner = Learner(recipe, recipe.build_model(SCHEMA), job.spec, Group(0, 1, GPU))
    batch = {"image": torch.rand(48, 8, 8, device=GPU), "label": torch.arange(48, device=GPU) % 10}
    learner.step(batch, 48, 48)
    wanted = {name: value.to(CPU, copy=True) for name, value in learner.model.state_dict().items()}
    averages = [state["exp_avg"].to(CPU, copy=True) for state in learner.optimizer.state_dict()["state"].values()]
    torch.cuda._sleep(200_000_000)  # the copies wait behind it, and what comes after must wait for them
    copies = learner.copy_weights(), learner.copy_training()
    for _ in range(3):
        learner.step(batch, 48, 48)
    weights, training = (copy() for copy in copies)
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    kept = unpack(**training)["optimizer"]["state"].values()
    assert all(torch.equal(state["exp_avg"], average) for state, average in zip(kept, averages, strict=True))
