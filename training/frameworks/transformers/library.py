"""What does the user's code say of a Hugging Face model: how is it built, what does it take of a batch? Without Ray."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from penstock.errors import SpecError, TrainingError
from penstock.ingest.schema import FeedSchema
from penstock.training.frameworks.own_trainer import blaming_the_build
from penstock.training.frameworks.transformers.arguments import split_params
from penstock.training.model import ClassScores
from penstock.usercode.capture import UserCode

__all__ = ["UsersModel"]

LABELS = "labels"
"""What models of transformers call the label."""


class UsersModel:
    """What `train.recipe` names: a function `(schema, **params)`, or a class with `build_model(schema)`.

    Raises:
        SpecError: it is neither, or `train.params` do not fit.
    """

    def __init__(self, code: UserCode, params: Mapping[str, Any]) -> None:
        self._code = code
        found = code.load()
        located = code.located(dict(params))
        if isinstance(found, type):
            own, self.arguments = split_params(found, located, after=0)
            users = blaming_the_build(code, lambda: found(**own))
            build = getattr(users, "build_model", None)
            if not callable(build):
                raise SpecError(
                    f"train.recipe: {code.target} has no method build_model(schema)", next_step="see docs/transformers.md"
                )
            self._users: Any = users
            self._build: Callable[[FeedSchema], Any] = build
        elif callable(found):
            own, self.arguments = split_params(found, located, after=1)
            self._users, self._build = None, lambda schema: found(schema, **own)
        else:
            raise SpecError(f"train.recipe: {code.target} is a {type(found).__name__}, not a function or a class")

    @property
    def predicts(self) -> ClassScores:
        """The class's `predicts`, else logits."""
        return getattr(self._users, "predicts", "logits")

    @property
    def trainer(self) -> type | None:
        """The class's own Trainer, if it names one."""
        return getattr(self._users, "trainer", None)

    def build(self, schema: FeedSchema) -> nn.Module:
        """A model with fresh weights.

        Raises:
            SpecError: the code fails, or what it returns is no torch module.
        """
        model = blaming_the_build(self._code, lambda: self._build(schema))
        if not isinstance(model, nn.Module):
            raise SpecError(f"train.recipe: {self._code.target} built a {type(model).__name__}, not a torch module")
        return model

    def inputs(self, model: nn.Module, batch: Mapping[str, Tensor], label: str | None) -> dict[str, Any]:
        """What the model's `forward` is called with: the class's `inputs(batch)`, else the columns that it names.

        The label goes by the name `labels`, if it is in the batch.

        Raises:
            TrainingError: `forward` has an argument of none of the columns' names.
        """
        labels = {LABELS: batch[label]} if label is not None and label in batch else {}
        columns = {name: column for name, column in batch.items() if name != label}
        own = getattr(self._users, "inputs", None)
        if callable(own):
            return {**labels, **own(columns)}
        takes = inspect.signature(model.forward).parameters
        taken = {name: column for name, column in columns.items() if name in takes}
        if not taken:
            raise TrainingError(
                f"{self._code.target}: {type(model).__name__} takes none of the columns {', '.join(map(repr, columns))}",
                next_step=f"it takes {', '.join(list(takes)[:6])}, ...: give a column that name, or write inputs(batch)",
            )
        return {**labels, **taken}
