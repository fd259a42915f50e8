"""How is a user's LightningModule made, and which of the two Lightning packages does it derive from?"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from penstock.errors import SpecError
from penstock.training.recipe import build_by_user
from penstock.usercode.capture import UserCode

__all__ = ["DISTRIBUTIONS", "has_own", "lightning_of", "make_module", "quiet", "refuse_averages"]

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
    return build_by_user(code, lambda: kind(**code.located(params)))


def has_own(module: Any, method: str) -> bool:
    """Whether a user's module has a method of its own in place of LightningModule's."""
    return getattr(type(module), method) is not getattr(lightning_of(type(module)).LightningModule, method)


def refuse_averages(callbacks: Iterable[Any]) -> None:
    """Refuse callbacks that validate with other weights than the module has.

    Raises:
        SpecError: one averages weights; a checkpoint has only the module's.
    """
    for callback in callbacks:
        if {"WeightAveraging", "StochasticWeightAveraging"} & {base.__name__ for base in type(callback).__mro__}:
            name = type(callback).__name__
            raise SpecError(
                f"train.recipe: the callback {name} validates averages of the weights, which are in no checkpoint",
                next_step="take it out of configure_callbacks(); a recipe (docs/recipe.md) has train.callbacks: [ema]",
            )


@contextmanager
def quiet(pl: Any) -> Iterator[None]:
    """Silence Lightning's lines about devices, and its warnings."""
    logger = logging.getLogger(f"{pl.__name__}.utilities.rank_zero")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
