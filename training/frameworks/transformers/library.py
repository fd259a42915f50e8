"""How is the user's Hugging Face model built from `train.params`, and how is a batch passed to it? Without Ray."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from penstock.errors import SpecError, TrainingError
from penstock.ingest.schema import FeedSchema
from penstock.messages import did_you_mean
from penstock.training.model import ClassScores
from penstock.training.recipe import build_by_user
from penstock.usercode.capture import UserCode

__all__ = ["TRAINERS", "UsersModel"]

LABELS = "labels"
"""The label's name in models of transformers."""

TRAINERS = frozenset(
    {
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "max_grad_norm"),
        *("adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args", "optim_target_modules"),
        *("label_smoothing_factor", "neftune_noise_alpha", "gradient_checkpointing", "gradient_checkpointing_kwargs"),
        *("average_tokens_across_devices", "ddp_find_unused_parameters"),
    }
)
"""TrainingArguments that `train.params` may have."""


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
            own, self.arguments = _split_params(found, located, after=0)
            users = build_by_user(code, lambda: found(**own))
            build = getattr(users, "build_model", None)
            if not callable(build):
                raise SpecError(
                    f"train.recipe: {code.target} has no method build_model(schema)", next_step="see docs/transformers.md"
                )
            self.users: Any = users
            """The user's object, or function."""
            self._build: Callable[[FeedSchema], Any] = build
        elif callable(found):
            own, self.arguments = _split_params(found, located, after=1)
            self.users, self._build = found, lambda schema: found(schema, **own)
        else:
            raise SpecError(f"train.recipe: {code.target} is a {type(found).__name__}, not a function or a class")

    @property
    def predicts(self) -> ClassScores:
        """The class's `predicts`, else logits."""
        return getattr(self.users, "predicts", "logits")

    @property
    def trainer(self) -> type | None:
        """The class's own Trainer, if it names one."""
        return getattr(self.users, "trainer", None)

    def build(self, schema: FeedSchema) -> nn.Module:
        """Build a model with fresh weights.

        Raises:
            SpecError: the code fails, or does not return a torch module.
        """
        model = build_by_user(self._code, lambda: self._build(schema))
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
        own = getattr(self.users, "inputs", None)
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


def _split_params(build: Callable[..., Any], params: Mapping[str, Any], *, after: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sort the params by name.

    Args:
        build: the user's function or class.
        after: number of its first arguments that are not from `params`.

    Returns:
        (arguments of `build`, TrainingArguments).

    Raises:
        SpecError: some names are unknown to both, or arguments of both.
    """
    from transformers import TrainingArguments

    taken = list(inspect.signature(build).parameters.values())[after:]
    all_others = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken)
    own = {one.name for one in taken if one.kind is not inspect.Parameter.VAR_KEYWORD}
    decided = {field.name for field in fields(TrainingArguments)} - TRAINERS
    name = getattr(build, "__name__", str(build))
    problems = []
    for param in params:
        if param in own & TRAINERS:
            problems.append(f"train.params.{param} is an argument of {name} and of TrainingArguments; rename that of {name}")
        elif param in own | TRAINERS:
            continue
        elif param in decided:
            problems.append(f"train.params.{param} is set by the pipeline; docs/transformers.md names the key in its place")
        elif not all_others:
            hint = did_you_mean(param, own | TRAINERS)
            problems.append(f"train.params.{param} is not an argument of {name} or TrainingArguments{hint}")
    if problems:
        raise SpecError("train does not fit transformers", problems=problems, next_step="see docs/transformers.md")
    trainers = {param: value for param, value in params.items() if param in TRAINERS - own}
    return {param: value for param, value in params.items() if param not in trainers}, trainers
