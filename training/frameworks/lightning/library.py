"""Which Lightning is a user's class of, and is it one that can be trained?"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from penstock.errors import SpecError
from penstock.training.frameworks.own_trainer import blaming_the_build
from penstock.usercode.capture import UserCode

__all__ = ["DISTRIBUTIONS", "lightning_of", "make_module"]

DISTRIBUTIONS = {"lightning": "lightning.pytorch", "pytorch-lightning": "pytorch_lightning"}
"""Distribution -> the module that has the Trainer. Classes of one are none of the other's."""


def lightning_of(kind: type) -> Any:
    """The package that has the Trainer for the class.

    Raises:
        SpecError: it is no LightningModule.
    """
    for base in kind.__mro__:
        for package in DISTRIBUTIONS.values():
            if base.__name__ == "LightningModule" and base.__module__.startswith(f"{package}."):
                return importlib.import_module(package)
    raise SpecError(
        f"train.recipe: {kind.__name__} is no LightningModule",
        next_step="derive it from lightning.pytorch.LightningModule, or take train.framework out: a recipe has no base class",
    )


def make_module(code: UserCode, params: Mapping[str, Any]) -> Any:
    """The user's LightningModule, constructed with `train.params`.

    Raises:
        SpecError: what is named is no LightningModule, or cannot be constructed.
    """
    kind = code.load()
    if not isinstance(kind, type):
        raise SpecError(f"train.recipe: {code.target} is a {type(kind).__name__}, not a class")
    lightning_of(kind)
    return blaming_the_build(code, lambda: kind(**code.located(dict(params))), params)
