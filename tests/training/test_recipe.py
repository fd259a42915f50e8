"""Is a wrong recipe refused with its name and what is missing, and does a right one get the defaults?"""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import SpecError, TrainingError
from penstock.training.frameworks.torch.framework import TORCH
from penstock.training.ranks import Group
from penstock.training.recipe import Recipe, load_recipe
from penstock.training.spec import TrainSpec
from penstock.training.step.learner import Learner
from penstock.usercode.capture import UserCode, capture
from tests.training.digits import SCHEMA, make_job
from tests.training.recipes import Linear


def code(name: str) -> UserCode:
    return capture(f"recipes.py:{name}", Path(__file__).parent)


def recipe_of(user: Any) -> Recipe:
    return Recipe(user, "model.py:Mine")


BATCH = {"image": torch.zeros(4, 8, 8), "label": torch.zeros(4, dtype=torch.int64)}


def test_missing_method_is_named_with_existing_ones() -> None:
    with pytest.raises(SpecError, match=r"recipes\.py:NoLoss is not a recipe") as caught:
        load_recipe(code("NoLoss"), {})
    assert "no method loss()" in caught.value.problems[0] and "build_model" in caught.value.problems[0]


def test_parameters_that_do_not_fit_are_named() -> None:
    with pytest.raises(SpecError, match=r"train\.params do not fit recipes\.py:Digits: .*'hiden'"):
        load_recipe(code("Digits"), {"hiden": 3, "dropout": 0.1})


def test_recipe_that_is_not_a_class_is_refused() -> None:
    with pytest.raises(SpecError, match="not a class"):
        load_recipe(code("torch"), {})


def test_two_methods_are_enough() -> None:
    recipe = load_recipe(code("OnlyLoss"), {})
    model = recipe.build_model(SCHEMA)
    assert not recipe.can_predict and not recipe.has("augment") and recipe.metrics() is None
    optimizer = recipe.optimizer(model, 0.5)
    assert isinstance(optimizer, torch.optim.AdamW) and optimizer.param_groups[0]["lr"] == 0.5
    assert recipe.scheduler(optimizer) is None and recipe.scheduler_every == "step"
    assert recipe.loss(model, BATCH).shape == ()


def test_learning_rate_unread_by_own_optimizer_is_refused() -> None:
    own, usual = (TrainSpec(recipe=f"recipes.py:{name}", learning_rate=0.1) for name in ("Scheduled", "Digits"))
    with pytest.raises(SpecError, match=r"train\.learning_rate is 0\.1, and recipes\.py:Scheduled .* \(recipes\.py:\d"):
        TORCH.check(code("Scheduled"), own)
    TORCH.check(code("Digits"), usual)
    TORCH.check(code("Scheduled"), TrainSpec(recipe="recipes.py:Scheduled"))


class Forgetful(torch.optim.Optimizer):
    """Has no learning rate, and looks for a setting that it was not given."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["momentum"]


def test_error_in_optimizer_names_the_users_line(tmp_path: Path) -> None:
    class Mine(Linear):
        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return Forgetful(model.parameters())

    recipe = recipe_of(Mine())
    learner = Learner(recipe, recipe.build_model(SCHEMA), make_job(tmp_path).spec, Group(0, 1, torch.device("cpu")))
    assert math.isnan(learner.learning_rate)
    with pytest.raises(TrainingError, match=r"a step of training failed: KeyError: 'momentum' \(.*test_recipe\.py:\d+ in step"):
        learner.step(dict(BATCH), 4, 4)


def test_a_loss_per_row_is_refused() -> None:
    class Rows:
        def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return batch["image"].sum(dim=(1, 2))

    with pytest.raises(TrainingError, match=r"returned a tensor of shape \[4\]; it must return a scalar"):
        recipe_of(Rows()).loss(nn.Identity(), BATCH)


def test_predictions_for_too_few_rows_are_refused() -> None:
    class Short:
        def predict(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.zeros(3)

    with pytest.raises(TrainingError, match="for a batch of 4 rows"):
        recipe_of(Short()).predict(nn.Identity(), BATCH, 4)


def test_packed_column_may_be_longer_than_the_batch() -> None:
    class Sums:
        def predict(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            edges = batch["tokens_offsets"]
            return torch.stack([batch["tokens"][a:b].sum() for a, b in itertools.pairwise(edges)])

    packed = {"tokens": torch.arange(7), "tokens_offsets": torch.tensor([0, 3, 3, 7])}
    assert recipe_of(Sums()).predict(nn.Identity(), packed, 3).tolist() == [3, 0, 18]


def test_error_of_user_code_shows_its_traceback() -> None:
    class Deep:
        def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.inner(batch)

        def inner(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.matmul(batch["image"], torch.zeros(3, 3))

    with pytest.raises(
        TrainingError, match=r"model\.py:Mine: loss\(\) failed: RuntimeError: .*test_recipe\.py:\d+ in inner"
    ) as caught:
        recipe_of(Deep()).loss(nn.Identity(), BATCH)
    assert caught.value.exit_code == 5
    assert len(caught.value.problems) == 1 and "in loss: return self.inner(batch)" in caught.value.problems[0]


def test_exit_in_user_code_is_named() -> None:
    class Exits:
        def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            sys.exit(2)

    with pytest.raises(TrainingError, match=r"loss\(\) failed: SystemExit: 2 \(.*in loss"):
        recipe_of(Exits()).loss(nn.Identity(), BATCH)


def test_a_model_without_parameters_to_train_is_refused() -> None:
    with pytest.raises(TrainingError, match="without trainable parameters"):
        recipe_of(object()).optimizer(nn.Flatten(), 0.1)


def test_undeclared_sigmoid_of_several_labels_is_refused() -> None:
    rows, model = torch.rand(2, 4), torch.nn.Linear(4, 3)
    recipe = Recipe(SimpleNamespace(), "model.py:Tags")
    recipe.refuse_undeclared(model(rows).clamp(0.1, 0.9), None, model, lambda: model(rows))
    with pytest.raises(TrainingError, match="numbers from 0 to 1; are they probabilities or logits"):
        recipe.refuse_undeclared(torch.tensor([[0.4, 0.5, 0.6]]), None, model, lambda: model(rows).sigmoid())
    declared = Recipe(SimpleNamespace(predicts="probabilities"), "model.py:Tags")
    declared.refuse_undeclared(torch.tensor([[0.4, 0.5, 0.6]]), None, model, lambda: model(rows).sigmoid())
