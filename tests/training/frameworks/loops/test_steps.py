"""Does a model that learns batch by batch continue to the same weights, validated and saved where it is due?"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import SpecError, TrainingError
from penstock.storage import Storage
from penstock.training.checkpoint.exactness import BIT_EXACT
from penstock.training.checkpoint.journal import read_journal
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.events import Resumed, TrainProgress
from penstock.training.frameworks.loops import steps
from penstock.training.frameworks.loops.own_loop import UNREAD, LearnsBatches
from penstock.training.model import ModelSpec, TrainedModel
from penstock.training.on_ray.worker import RankResult
from penstock.training.ranks import Group
from penstock.training.spec import TrainSpec
from tests.training.digits import CPU, ListClient, make_job


class Means(TrainedModel):
    """The mean image of each class; the loss of a batch is its number of rows. Fails in the step of `dies`."""

    def __init__(self, spec: ModelSpec, files: Storage | None) -> None:
        self.params, self.batches = spec.params, 0
        self.sums = np.zeros((10, 65), np.float64) if files is None else np.load(Path(files.root, "sums.npy"))

    def learn(self, batch: dict[str, torch.Tensor]) -> dict[str, float]:
        self.batches += 1
        if self.batches == self.params.get("dies"):
            raise RuntimeError("killed")
        rows = np.concatenate([batch["image"].reshape(-1, 64).numpy(), np.ones((len(batch["label"]), 1))], axis=1)
        np.add.at(self.sums, batch["label"].numpy(), rows)
        return {"train/loss": math.nan if self.batches == self.params.get("nan") else float(len(rows))}

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.tensor(0.5)

    def predict(self, batch: dict[str, torch.Tensor], rows: int) -> torch.Tensor:
        means = torch.from_numpy(self.sums[:, :64] / np.maximum(self.sums[:, 64:], 1))
        return -torch.cdist(batch["image"].reshape(rows, 64).double(), means)

    def write(self, folder: Path) -> None:
        np.save(folder / "sums.npy", self.sums)


class OfMeans(LearnsBatches):
    loader = f"{__name__}:Means"
    model_files = ("sums.npy",)


@pytest.fixture(autouse=True)
def means(monkeypatch: pytest.MonkeyPatch) -> None:
    """The framework of these jobs."""
    monkeypatch.setattr(steps, "FRAMEWORKS", SimpleNamespace(get=lambda name: OfMeans()))


def run(folder: Path, name: str, attempt: int = 1, client: ListClient | None = None, **spec: Any) -> RankResult:
    params = spec.pop("params", {})
    job = make_job(folder, run=name, attempt=attempt, **spec)
    job = replace(job, spec=job.spec.model_copy(update={"params": params}))
    return OfMeans().run_rank(job, Group(0, 1, CPU), client or ListClient())


def manifest(folder: Path, name: str) -> Any:
    checkpoint, _ = job_checkpoints(make_job(folder, run=name)).newest_valid()
    assert checkpoint is not None
    return checkpoint.manifest


def test_killed_model_continues_to_the_same_weights(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"checkpoint": {"every_s": None, "every_steps": 3}, "validate_every_steps": 4}
    whole, client = run(tmp_path, "whole", **spec), ListClient()
    with pytest.raises(TrainingError, match="killed"):
        run(tmp_path, "parts", params={"dies": 12}, **spec)
    parts = run(tmp_path, "parts", 2, client, **spec)
    assert (whole.status, whole.state.step, whole.exactness) == ("finished", 14, BIT_EXACT)
    assert (parts.status, parts.state, parts.resumed_from_step) == ("finished", whole.state, 9)
    assert manifest(tmp_path, "parts").weights_digest == manifest(tmp_path, "whole").weights_digest
    assert manifest(tmp_path, "parts").metrics["val/accuracy"] > 0.8
    assert [event.step for event in client.events if isinstance(event, Resumed)] == [9]
    assert {event.total_steps for event in client.events if isinstance(event, TrainProgress)} == {14}
    points = read_journal(make_job(tmp_path, run="parts").run_storage, 99)
    assert [point.step for point in points if "val/loss" in point.values] == [4, 7, 8, 12, 14]


@pytest.mark.parametrize("given", [{"every_steps": 7, "every_s": None}, {"every_s": 1e-9}])
def test_save_due_at_the_end_of_an_epoch_is_made(tmp_path: Path, given: dict[str, Any]) -> None:
    run(tmp_path, "saves", checkpoint={"every_epoch": False, "keep": 99, **given})
    steps = [each.manifest.step for each in job_checkpoints(make_job(tmp_path, run="saves")).committed()]
    assert {7, 14} <= {*steps}


def test_nan_loss_stops_training(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="the training loss is nan at step 2"):
        run(tmp_path, "stops", params={"nan": 2})


def test_max_steps_ends_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    ended = run(tmp_path, "run", max_steps=9)
    assert (ended.status, ended.state.step, ended.state.epoch) == ("finished", 9, 1)
    assert manifest(tmp_path, "run").step == 9


GIVEN: dict[str, Any] = {
    "learning_rate": 0.1,
    "clip_norm": 1.0,
    "accumulate": 2,
    "precision": "bf16",
    "compile": True,
    "callbacks": ["ema"],
    "last_batch": "drop",
    "start_from": "run:base",
}
"""Values of the settings that the loop does not read."""


@pytest.mark.parametrize("name", GIVEN)
def test_unread_setting_is_refused_before_start(name: str) -> None:
    code: Any = SimpleNamespace(load=lambda: None)
    assert [*GIVEN] == [*UNREAD]
    with pytest.raises(SpecError) as refused:
        OfMeans().check(code, TrainSpec(recipe="model.py:Net", **{name: GIVEN[name]}))
    assert refused.value.problems == (f"train.{name} is not read; {UNREAD[name]}",)


def test_second_worker_is_refused_before_start() -> None:
    code: Any = SimpleNamespace(load=lambda: None)
    assert OfMeans().check(code, TrainSpec(recipe="model.py:Net")).predicts
    with pytest.raises(SpecError, match=r"train\.workers: 2 with train\.framework: torch, which trains in one process"):
        OfMeans().check(code, TrainSpec(recipe="model.py:Net", workers=2))
