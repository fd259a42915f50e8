"""Which of the two Lightning packages does a user's class derive from?"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from penstock.errors import SpecError
from penstock.training.frameworks.on_workers import build_user_model
from penstock.usercode.capture import UserCode

__all__ = ["DISTRIBUTIONS", "lightning_of", "make_module"]

DISTRIBUTIONS = {"lightning": "lightning.pytorch", "pytorch-lightning": "pytorch_lightning"}
"""Distribution -> the module that has the Trainer. A class of one does not fit the other."""


def lightning_of(kind: type) -> Any:
    """Find the package that has the Trainer for the class.

    Raises:
        SpecError: the class is not a LightningModule.
    """
    for base in kind.__mro__:
        for package in DISTRIBUTIONS.values():
            if base.__name__ == "LightningModule" and base.__module__.startswith(f"{package}."):
                return importlib.import_module(package)
    raise SpecError(
        f"train.recipe: {kind.__name__} is not a LightningModule",
        next_step="derive it from lightning.pytorch.LightningModule, or take train.framework out: a recipe has no base class",
    )


def make_module(code: UserCode, params: Mapping[str, Any]) -> Any:
    """Construct the user's LightningModule with `train.params`.

    Raises:
        SpecError: the class is not a LightningModule, or cannot be constructed.
    """
    kind = code.load()
    if not isinstance(kind, type):
        raise SpecError(f"train.recipe: {code.target} is a {type(kind).__name__}, not a class")
    lightning_of(kind)
    return build_user_model(code, lambda: kind(**code.located(dict(params))), params)
