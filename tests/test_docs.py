"""The documentation says what the code does."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.storage import Storage
from penstock.training.callbacks.callback import HOOKS, Callbacks, Training
from penstock.training.callbacks.registry import CALLBACKS
from penstock.training.own_values import OwnValues, collecting
from penstock.training.ranks import Group
from penstock.training.recipe import Recipe
from penstock.training.spec import TrainSpec
from penstock.training.state import TrainState
from penstock.training.step.learner import Learner
from tests import ROOT
from tests.training.digits import CPU, SCHEMA


def test_the_spec_reference_is_the_one_the_code_gives() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_spec_reference.py"))["reference"]()
    assert (ROOT / "docs" / "spec.md").read_text(encoding="utf-8") == made, "run: python docs/make_spec_reference.py"


def test_the_example_of_a_transform_does_what_it_says() -> None:
    section = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8").split("## Functions for `map_batches`")[1]
    names: dict[str, Any] = {}
    exec(section.split("```python\n")[1].split("```")[0], names)
    out = names["normalize"]({"age": np.array([50, 0])})
    assert out["age"].tolist() == [0.5, 0]
    assert out["_keep"].tolist() == [True, False]


def block(page: str, heading: str) -> str:
    """The first Python example below a heading."""
    section = (ROOT / "docs" / page).read_text(encoding="utf-8").split(f"## {heading}\n")[1]
    return section.split("```python\n")[1].split("```")[0]


def test_the_gan_of_the_recipe_page_learns_with_both_of_its_optimizers() -> None:
    gans = {"Generator": lambda: nn.Linear(64, 9), "Critic": lambda: nn.Linear(9, 1), "softplus": nn.functional.softplus}
    names: dict[str, Any] = {"torch": torch, **gans}
    exec(block("recipe.md", "Several optimizers, or a step of your own"), names)
    recipe = Recipe(names["Gan"](), "model.py:Gan")
    learner = Learner(recipe, recipe.build_model(SCHEMA), TrainSpec(recipe="model.py:Gan"), Group(0, 1, CPU))
    before = learner.copy_weights()()
    learner.step({"image": torch.ones(4, 9)}, 4, 4)
    after = learner.copy_weights()()
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    assert recipe.loss(learner.model, {"image": torch.ones(4, 9)}).shape == ()


def test_the_callback_of_the_callbacks_page_logs_and_stops(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(block("callbacks.md", "One of your own"), names)
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 2000.0)
    callbacks = Callbacks([("callbacks.py:Histogram", names["Histogram"](every=1))])
    callbacks.begin(Training(model, None, 0, 1, CPU, False, Storage(str(tmp_path))))
    with collecting(OwnValues(None, "train")) as own:
        callbacks.after_step(TrainState(step=1), epoch_done=False)
        assert own.totals() == {"weights/largest": 2000.0}
    assert callbacks.wants_end and callbacks.state_dict()["states"] == {"0: callbacks.py:Histogram": {"largest": 2000.0}}


@pytest.mark.parametrize("page", ["format", "framework", "registry", "tracker", "transform"])
def test_what_another_package_adds_is_shown_in_thirty_lines(page: str) -> None:
    text = (ROOT / "docs" / "extend" / f"{page}.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 30


def test_the_pages_name_every_callback_and_hook() -> None:
    page = (ROOT / "docs" / "callbacks.md").read_text(encoding="utf-8")
    assert [name for name in (*CALLBACKS.names, *HOOKS) if f"`{name}" not in page] == []
