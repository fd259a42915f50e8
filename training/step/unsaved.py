"""Does a recipe keep state that no checkpoint holds? A continued run begins it anew, so it may differ from an undisturbed one.

Counters, annealed numbers, lists, tensors and generators on the recipe and on the model's modules, non-persistent buffers, and
parameters that are frozen or thawed while training. They cannot be restored; that they change can be seen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.digest import bytes_digest

__all__ = ["changed_parts", "changed_state", "parts_of", "unsaved_state"]

_INTERNAL = frozenset(vars(nn.Module()))

_MOST = 10_000
"""Values of a list or tensor that are compared; those of a larger list are not, and of a larger tensor its version is."""


def unsaved_state(model: nn.Module, recipe: object | None = None, internal: Collection[str] = _INTERNAL) -> dict[str, object]:
    """Return the values that can change and are not in the model's state_dict, by name, for `changed_state`.

    Args:
        internal: attributes of modules that are not the user's.
    """
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: dict[str, object] = {f"{name}.requires_grad": each.requires_grad for name, each in model.named_parameters()}
    for place, owner in [*([("recipe", recipe)] if recipe is not None else []), *model.named_modules()]:
        values = {
            name: value for name, value in getattr(owner, "__dict__", {}).items() if owner is recipe or name not in internal
        }
        if isinstance(owner, nn.Module):
            if type(owner).get_extra_state is not nn.Module.get_extra_state:
                continue  # a checkpoint holds what it returns
            hidden = {name: owner._buffers[name] for name in owner._non_persistent_buffers_set}
            found |= {f"{place}.{name}".lstrip("."): _copied(value, set()) for name, value in hidden.items()}
        found |= {f"{place}.{name}".lstrip("."): _copied(value, own) for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}


def changed_state(then: dict[str, object], now: dict[str, object]) -> list[str]:
    """Return the names whose values differ. State that appears later is not compared: a cache is filled once."""
    return sorted(name for name, value in then.items() if name in now and now[name] != value)


def parts_of(model: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """Return the names in the model's state_dict, with the shapes of buffers; None for lazy ones and for all others."""
    shapes = {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if not is_lazy(buffer)}
    return {name: shapes.get(name) for name in model.state_dict()}


def changed_parts(then: Mapping[str, tuple[int, ...] | None], now: Mapping[str, tuple[int, ...] | None]) -> list[str]:
    """Return the names that are new or gone, and the buffers of another shape: a built model cannot load such state."""
    resized = [name for name, shape in now.items() if shape is not None and then.get(name) not in (None, shape)]
    return sorted({*then} ^ {*now} | {*resized})


def _copied(value: Any, own: set[int], most: int = _MOST) -> object:
    """Return something that is equal while `value` is; None for what cannot be compared, or is the model's own."""
    if isinstance(value, bool | int | float | str):
        return repr(value)  # NaN equals itself
    if isinstance(value, torch.Generator):
        return bytes_digest(value.get_state().numpy().tobytes())
    if isinstance(value, Tensor):
        if id(value) in own or value.requires_grad:
            return None
        if value.numel() > _MOST or value.layout is not torch.strided:
            return id(value), value._version
        return bytes_digest(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, nn.Module):
        return [_copied(tensor, own) for tensor in value.state_dict(keep_vars=True).values() if isinstance(tensor, Tensor)]
    if isinstance(value, list | tuple | dict) and len(value) <= most:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        fewer = most // (2 * max(len(value), 1))  # a list may hold itself
        return [(str(key), _copied(each, own, fewer)) for key, each in items]
    return None
