"""How is the user's Hugging Face model built, and how is a batch passed to it? Without Ray."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from penstock.errors import SpecError, TrainingError
from penstock.ingest.schema import FeedSchema
from penstock.training.frameworks.on_workers import build_user_model
from penstock.training.frameworks.transformers.arguments import split_params
from penstock.training.model import ClassScores
from penstock.usercode.capture import UserCode

__all__ = ["UsersModel"]

LABELS = "labels"
"""The label's name in models of transformers."""


class UsersModel:
    """The code of `train.recipe`: a function `(schema, **params)`, or a class with `build_model(schema)`.

    Raises:
        SpecError: the code is neither, or `train.params` do not fit.
    """

    def __init__(self, code: UserCode, params: Mapping[str, Any]) -> None:
        self._code = code
        found = code.load()
        located = code.located(dict(params))
        if isinstance(found, type):
            own, self.arguments = split_params(found, located, after=0)
            users = build_user_model(code, lambda: found(**own))
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
        """Build a model with fresh weights.

        Raises:
            SpecError: the code fails, or does not return a torch module.
        """
        model = build_user_model(self._code, lambda: self._build(schema))
        if not isinstance(model, nn.Module):
            raise SpecError(f"train.recipe: {self._code.target} built a {type(model).__name__}, not a torch module")
        return model

    def inputs(self, model: nn.Module, batch: Mapping[str, Tensor], label: str | None) -> dict[str, Any]:
        """Choose the arguments of the model's `forward`: the class's `inputs(batch)`, else the columns with names of arguments.

        The label becomes `labels`, if it is in the batch.

        Raises:
            TrainingError: no column has the name of an argument.
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
                next_step=f"its arguments are {', '.join(list(takes)[:6])}, ...: rename a column, or write inputs(batch)",
            )
        return {**labels, **taken}
