"""Which hyperparameters does a recipe set, and which may change when training continues?

The optimizer and the schedule are compared as made, before the first step. A checkpoint's manifest keeps them as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.errors import ResumeError
from penstock.training.step.own_step import Several

__all__ = ["OPTIMIZER", "changed_hyperparameters", "format_changes", "hyperparameters_of"]

OPTIMIZER = "optimizer"
"""Its name among the hyperparameters."""

_NO_OPTIONS = ("params", "param_names")

_SHORT = 40


def hyperparameters_of(optimizer: Optimizer | Several, scheduler: Any, every: str) -> dict[str, str]:
    """Describe a new optimizer and schedule: name to value as JSON, a list where parameter groups differ."""
    groups = [{name: value for name, value in group.items() if name not in _NO_OPTIONS} for group in optimizer.param_groups]
    found = {OPTIMIZER: optimizer.kind if isinstance(optimizer, Several) else type(optimizer).__name__}
    for name in dict.fromkeys(name for group in groups for name in group):
        values = [_text(group.get(name)) for group in groups]
        found[name] = values[0] if len(set(values)) == 1 else f"[{', '.join(values)}]"
    if scheduler is None:
        return found
    state = {f"scheduler.{name}": _text(value) for name, value in scheduler.state_dict().items()}
    return {**found, "scheduler": type(scheduler).__name__, "scheduler_every": every, **state}


def changed_hyperparameters(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names whose values differ; all can be applied to a checkpoint's state.

    Raises:
        ResumeError: the state of the checkpoint's optimizer does not fit; all reasons are listed.
    """
    changed = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    # An option that a new torch has added is at its default.
    options = [name for name in changed if "scheduler" not in name and name in then and name in now]
    refused = [name for name in options if not _applies(name, then[name], now[name])]
    if refused:
        raise ResumeError(
            "the checkpoint's optimizer has a state that the recipe's optimizer cannot continue from",
            problems=format_changes(refused, then, now),
            next_step="undo the change of the recipe, or start over with `penstock run FILE --fresh`",
        )
    return changed


def format_changes(names: list[str], then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Format `name before -> after`, without values that follow from others."""
    shown = [name for name in names if "._" not in name and name not in ("initial_lr", "scheduler.base_lrs")] or names
    pairs = [(name, then.get(name, "none"), now.get(name, "none")) for name in shown]
    return [f"{name} {a} -> {b}" if max(len(a), len(b)) <= _SHORT else name for name, a, b in pairs]


def _applies(name: str, then: str, now: str) -> bool:
    """Whether the new value can be applied: numbers can, except a momentum that only one of the two buffers."""
    values = [number for text in (then, now) for number in _leaves(json.loads(text))] if name != OPTIMIZER else [None]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return numbers and not (name == "momentum" and 0 in values)


def _leaves(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list) else [value]


def _text(value: Any) -> str:
    return json.dumps(value, default=_plain, sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, torch.dtype | type):
        return str(value)
    # Objects are compared by attributes, without addresses.
    state = getattr(value, "__dict__", None)
    return {"class": type(value).__name__, **state} if state else re.sub(r" at 0x[0-9a-f]+", "", repr(value))
