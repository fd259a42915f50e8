"""How do the entries of `train.callbacks` become objects? Plain data travels; each rank makes its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.errors import SpecError
from penstock.messages import misnamed
from penstock.training.callback_code import CallbackCode
from penstock.training.callbacks.callback import HOOKS, Callbacks
from penstock.training.callbacks.registry import CALLBACKS

__all__ = ["load_callbacks"]


def load_callbacks(entries: Sequence[CallbackCode]) -> Callbacks:
    """Make them.

    Raises:
        SpecError: one cannot be loaded or made, or has no method that would be called.
    """
    return Callbacks([(entry.name, _made(entry)) for entry in entries])


def _made(entry: CallbackCode) -> Any:
    kind = CALLBACKS.get(entry.name) if entry.code is None else entry.code.load()
    params = entry.params if entry.code is None else entry.code.located(entry.params)
    if not isinstance(kind, type):
        raise SpecError(f"train.callbacks: {entry.name} is a {type(kind).__name__}, not a class")
    if not any(callable(getattr(kind, hook, None)) for hook in (*HOOKS, "weights")):
        raise SpecError(f"train.callbacks: {entry.name} has none of the methods that are called: {', '.join(HOOKS)}")
    if callable(getattr(kind, "state_dict", None)) != callable(getattr(kind, "load_state_dict", None)):
        raise SpecError(f"train.callbacks: {entry.name} has one of state_dict() and load_state_dict(); it needs both, or none")
    try:
        return kind(**params)
    except TypeError as error:
        raise SpecError(
            f"train.callbacks: {entry.name} cannot be made with {entry.params}: {error}{misnamed(kind, params)}"
        ) from error
