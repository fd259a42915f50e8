"""Does training that continues go by the hyperparameters of now, and to the same bits where they did not change?"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim import lr_scheduler as schedules

from penstock.errors import ResumeError, TrainingError
from penstock.training.checkpoint.packed import unpack
from penstock.training.ranks import Group
from penstock.training.recipe import Recipe
from penstock.training.spec import TrainSpec
from penstock.training.state import TrainState
from penstock.training.step.learner import Learner

EPOCH = 5
ADAMW: Callable[..., Optimizer] = lambda parameters, **more: AdamW(parameters, **{"lr": 1e-2, **more})  # noqa: E731


class Line:
    """A recipe with a given optimizer and schedule."""

    def __init__(self, optimizer: Callable[[Any], Optimizer], schedule: Any, every: str = "step") -> None:
        self.optimizer = lambda model: optimizer(model.parameters())
        self.scheduler = schedule
        self.scheduler_every = every

    def build_model(self, _schema: Any) -> nn.Module:
        torch.manual_seed(1)
        return nn.Linear(3, 1)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - 1.0).square().mean()


def learner(optimizer: Any, schedule: Any = None, every: str = "step") -> Learner:
    recipe = Recipe(Line(optimizer, schedule or (lambda _: None), every), "model.py:Line")
    return Learner(recipe, recipe.build_model(None), TrainSpec(recipe="model.py:Line"), Group(0, 1, torch.device("cpu")))  # type: ignore[arg-type]


def rates_of(made: Learner, first: int, last: int) -> Iterator[tuple[float, ...]]:
    """Learn the steps from `first` to `last`; what each step is learned with."""
    for step in range(first, last):
        group = made.optimizer.param_groups[0]
        yield group["lr"], group.get("momentum", 0.0), *group.get("betas", ())
        torch.manual_seed(step)
        made.step({"x": torch.rand(4, 3)}, 4, 4)
        if (step + 1) % EPOCH == 0:
            made.end_epoch()


def saved_by(made: Learner) -> tuple[Any, ...]:
    """What a checkpoint keeps, as it is read back."""
    stream = io.BytesIO()
    torch.save(made.copy_training()(), stream)
    stream.seek(0)
    training = unpack(**torch.load(stream, weights_only=True))
    return copy.deepcopy(made.copy_weights()()), training, json.loads(json.dumps(made.hyperparameters))


def resumed(made: Learner, saved: tuple[Any, ...], step: int) -> list[str]:
    weights, training, made_with = saved
    return made.restore(weights, training, TrainState(step, step // EPOCH, 0), made_with)


SCHEDULES: dict[str, Any] = {
    "none": lambda _, __: None,
    "LambdaLR": lambda o, f: schedules.LambdaLR(o, lambda step: f / (1 + step)),
    "MultiplicativeLR": lambda o, f: schedules.MultiplicativeLR(o, lambda _: 1 - 0.1 * f),
    "StepLR": lambda o, f: schedules.StepLR(o, 3, gamma=0.5 * f),
    "MultiStepLR": lambda o, f: schedules.MultiStepLR(o, [2, 9], gamma=0.5 * f),
    "ConstantLR": lambda o, f: schedules.ConstantLR(o, 0.5 * f, 9),
    "LinearLR": lambda o, f: schedules.LinearLR(o, 0.2 * f, 1.0, 12),
    "ExponentialLR": lambda o, f: schedules.ExponentialLR(o, 0.9 * f),
    "PolynomialLR": lambda o, f: schedules.PolynomialLR(o, 20, power=2 * f),
    "CosineAnnealingLR": lambda o, f: schedules.CosineAnnealingLR(o, 20, eta_min=1e-4 * f),
    "CosineAnnealingWarmRestarts": lambda o, f: schedules.CosineAnnealingWarmRestarts(o, 4, eta_min=1e-4 * f),
    "CyclicLR": lambda o, f: schedules.CyclicLR(o, 1e-4 * f, 1e-2, 4, cycle_momentum=False),
    "OneCycleLR": lambda o, f: schedules.OneCycleLR(o, 1e-2 * f, total_steps=40),
    "SequentialLR": lambda o, f: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1 * f, 1.0, 4), schedules.CosineAnnealingLR(o, 20)], [4]
    ),
    "ChainedScheduler": lambda o, f: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.5 * f, 9), schedules.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_settings_continue_exactly_changed_schedule_keeps_step(name: str, every: str) -> None:
    def make(rate: float, factor: float) -> Learner:
        return learner(lambda p: AdamW(p, lr=rate), lambda o: SCHEDULES[name](o, factor), every)

    whole = make(1e-2, 1.0)
    expected = [*rates_of(whole, 0, 16)]
    other = make(2e-3, 0.8)
    changed_rates = [*rates_of(other, 0, 16)]
    first = make(1e-2, 1.0)
    assert [*rates_of(first, 0, 7)] == expected[:7]
    saved = saved_by(first)

    again = make(1e-2, 1.0)
    assert resumed(again, saved, 7) == []
    assert [*rates_of(again, 7, 16)] == expected[7:]
    for one, two in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, two)

    changed = make(2e-3, 0.8)
    assert resumed(changed, saved, 7)
    assert [*rates_of(changed, 7, 9)] == changed_rates[7:9]
    # And once more: a checkpoint made after the change.
    saved = saved_by(changed)
    third = make(2e-3, 0.8)
    assert resumed(third, saved, 9) == []
    assert [*rates_of(third, 9, 16)] == changed_rates[9:]


def test_changed_function_of_schedule_counts_from_next_step() -> None:
    first = learner(ADAMW, lambda o: schedules.LambdaLR(o, lambda _: 1.0))
    assert [rate for rate, *_ in rates_of(first, 0, 3)] == [1e-2] * 3
    second = learner(ADAMW, lambda o: schedules.LambdaLR(o, lambda step: 0.1 if step else 1.0))
    resumed(second, saved_by(first), 3)
    assert [rate for rate, *_ in rates_of(second, 3, 6)] == [1e-2] + [1e-3] * 2


def test_changed_options_apply_and_optimizer_state_stays() -> None:
    first = learner(ADAMW)
    list(rates_of(first, 0, 4))
    second = learner(lambda p: ADAMW(p, weight_decay=0.3, betas=(0.8, 0.95)))
    assert resumed(second, saved_by(first), 4) == ["betas", "weight_decay"]
    group = second.optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"], group["lr"]) == (0.3, (0.8, 0.95), 1e-2)
    parameter, before = next(second.model.parameters()), next(first.model.parameters())
    assert torch.equal(second.optimizer.state[parameter]["exp_avg"], first.optimizer.state[before]["exp_avg"])


def test_schedule_can_be_added_or_removed() -> None:
    plain, falling = learner(ADAMW), learner(ADAMW, lambda o: schedules.ExponentialLR(o, 0.5))
    list(rates_of(plain, 0, 2)), list(rates_of(falling, 0, 2))
    gone, come = learner(ADAMW), learner(ADAMW, lambda o: schedules.ExponentialLR(o, 0.5))
    resumed(gone, saved_by(falling), 2)
    resumed(come, saved_by(plain), 2)
    assert (gone.learning_rate, come.learning_rate) == (1e-2, 1e-2 * 0.25)


def test_options_added_by_optimizer_survive_a_change() -> None:
    first = learner(lambda p: ADAMW(p))
    first.optimizer.param_groups[0]["distance"] = 0.5  # as Prodigy does
    list(rates_of(first, 0, 2))
    second = learner(lambda p: ADAMW(p, weight_decay=0.3))
    resumed(second, saved_by(first), 2)
    assert second.optimizer.param_groups[0]["distance"] == 0.5


@pytest.mark.parametrize(
    ("then", "now", "named"),
    [
        (lambda p: Adam(p), lambda p: SGD(p, 1e-3), "optimizer Adam -> SGD"),
        (lambda p: Adam(p), lambda p: Adam(p, amsgrad=True), "amsgrad false -> true"),
        (lambda p: RMSprop(p), lambda p: RMSprop(p, momentum=0.9), "momentum 0 -> 0.9"),
    ],
)
def test_inapplicable_option_is_refused_by_name(then: Any, now: Any, named: str) -> None:
    first = learner(then)
    list(rates_of(first, 0, 2))
    with pytest.raises(ResumeError) as refused:
        resumed(learner(now), saved_by(first), 2)
    assert refused.value.problems == (named,)


def test_changed_schedule_that_is_too_short_is_refused() -> None:
    first = learner(ADAMW, lambda o: schedules.OneCycleLR(o, 1e-2, total_steps=40))
    list(rates_of(first, 0, 9))
    with pytest.raises(ResumeError, match=r"of step 9 does not fit the recipe's .* schedule: Tried to step"):
        resumed(learner(ADAMW, lambda o: schedules.OneCycleLR(o, 1e-2, total_steps=5)), saved_by(first), 9)


@pytest.mark.parametrize("rate", [lambda step: [1.0, 0.5, 0.1][step], lambda step: 1 / (2 - step), lambda step: None * step])
def test_changed_schedule_whose_code_fails_is_refused(rate: Callable[[int], float]) -> None:
    first = learner(ADAMW, lambda o: schedules.LambdaLR(o, lambda step: 1.0))
    list(rates_of(first, 0, 9))
    second = learner(lambda p: ADAMW(p, lr=1e-3), lambda o: schedules.LambdaLR(o, lambda step: rate(step) if step else 1.0))
    with pytest.raises(ResumeError, match=r"of step 9 does not fit the recipe's .* schedule") as refused:
        resumed(second, saved_by(first), 9)
    assert "undo the change" in refused.value.next_step and "--fresh" in refused.value.next_step


def test_schedule_that_needs_a_metric_is_refused() -> None:
    with pytest.raises(TrainingError, match="ReduceLROnPlateau, whose step"):
        learner(ADAMW, schedules.ReduceLROnPlateau)
