"""Does a recipe with several optimizers and a step of its own resume to the bit, and learn on two ranks as on one?"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import ResumeError, SpecError
from penstock.storage import Storage
from penstock.training.checkpoint.journal import read_journal
from penstock.training.checkpoint.manifest import Checkpoint
from penstock.training.checkpoint.state_files import weights_of
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.frameworks.torch.framework import TORCH
from penstock.training.ranks import Group
from penstock.training.step.own_step import OwnStep
from tests.training.digits import CPU, make_job, train_alone
from tests.training.ranks import run_ranks, train_ranks


def newest(folder: Path, run: str) -> Checkpoint:
    checkpoint, _ = CheckpointStore(Storage(str(folder / run))).newest_valid()
    assert checkpoint is not None
    return checkpoint


def test_gan_stopped_twice_ends_with_equal_weights(tmp_path: Path) -> None:
    train_alone(make_job(tmp_path, run="whole", recipe="Gan", clip_norm=0.5))
    for attempt, max_steps in enumerate([3, 9, None], start=1):
        train_alone(make_job(tmp_path, run="parts", recipe="Gan", attempt=attempt, max_steps=max_steps, clip_norm=0.5))
    whole, parts = newest(tmp_path, "whole").manifest, newest(tmp_path, "parts").manifest
    assert whole.step == parts.step == 14 and parts.exactness == "bit-exact"
    assert whole.weights_digest == parts.weights_digest and whole.metrics == parts.metrics
    assert 0 < (whole.metrics["val/realism"] or 0) < 1 and 0.2 < (whole.metrics["val/bright"] or 0) < 0.4
    points = {p.step: p.values for p in read_journal(Storage(str(tmp_path / "whole")), 14) if "train/loss" in p.values}
    assert all(
        values["train/critic"] + values["train/generator"] == pytest.approx(values["train/loss"]) for values in points.values()
    )


def test_two_ranks_learn_as_one_and_continue_to_the_bit(tmp_path: Path) -> None:
    more: dict[str, Any] = {"recipe": "LinearGan"}
    train_alone(make_job(tmp_path, run="one", **more))
    whole = make_job(tmp_path, run="two", workers=2, **more)
    parts = [make_job(tmp_path, run="parts", workers=2, attempt=n, max_steps=s, **more) for n, s in [(1, 5), (2, None)]]
    train_ranks(whole, *parts)
    one, two = (weights_of(newest(tmp_path, run).storage) for run in ("one", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.allclose(value, two[name], atol=1e-5), name
    assert newest(tmp_path, "two").manifest.weights_digest == newest(tmp_path, "parts").manifest.weights_digest


class Wide:
    def training_step(self, model: torch.nn.Module, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> Any:
        scores = batch["x"].to(model.weight.dtype) @ model.weight - (1j if model.weight.is_complex() else 1) + model.bias
        (loss := scores.abs().pow(2).mean()).backward()
        optimizer.step()
        return loss


def gradient_of(group: Group, dtype: torch.dtype) -> torch.Tensor:
    model = torch.nn.Module()
    model.bias = torch.nn.Parameter(torch.zeros(1))
    model.weight = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    step = OwnStep(Wide(), model, torch.optim.SGD(model.parameters(), lr=0.1), group, nullcontext, None)  # type: ignore[arg-type]
    rows = torch.tensor([[1.0, 2.0, 3.0], [0.1, 0.7, 0.3], [2.0, 1.0, 0.0], [5.0, 0.3, 1.0]], dtype=torch.float64)
    own = rows.chunk(group.world_size)[group.rank]
    step({"x": own}, len(own), len(rows))
    return model.weight.grad


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float64])
def test_complex_and_double_gradients_are_averaged(dtype: torch.dtype) -> None:
    one, two = gradient_of(Group(0, 1, CPU), dtype), run_ranks(gradient_of, 2, dtype)[1]
    torch.testing.assert_close(two, one, rtol=1e-6 if dtype is torch.complex64 else 1e-14, atol=0)
    assert one.is_complex() == two.imag.any() if one.is_complex() else two.dtype is dtype


def test_options_of_the_standard_step_are_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path, recipe="Gan", accumulate=2, compile=True)
    with pytest.raises(SpecError, match="training_step") as caught:
        TORCH.check(job.code, job.spec)
    assert [problem.split()[0] for problem in caught.value.problems] == ["train.accumulate", "train.compile"]


def test_a_changed_set_of_optimizers_is_refused_by_name(tmp_path: Path) -> None:
    train_alone(make_job(tmp_path, recipe="Gan", max_steps=2))
    with pytest.raises(ResumeError, match="optimizer"):
        train_alone(make_job(tmp_path, recipe="LinearGan", attempt=2))
