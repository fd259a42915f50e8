"""Does user code keep state that no checkpoint holds? A continued run begins it anew, so it may differ from an undisturbed one.

Numbers, lists, arrays, tensors, generators and objects of the user's classes: on the recipe, the model's modules, callbacks and
optimizers, as globals of the user's modules and attributes of their classes; non-persistent buffers, and parameters that are
frozen or thawed while training. They cannot be restored; that they change can be seen.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from random import Random
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from penstock.digest import bytes_digest
from penstock.usercode.package import CAPTURED

__all__ = ["Unsaved", "changed_parts", "parts_of", "unsaved_state"]

_INTERNAL = frozenset(vars(nn.Module()))

_MOST = 10_000
"""Values that are compared: of a larger list or set its length, of a larger array a sample, as of a tensor on a device or of
more than 82 MB, or of less in a list or a module; to digest such a tensor whole takes 30 ms."""


class Unsaved:
    """Compares the state that `look` finds with that before the first step."""

    def __init__(self, look: Callable[[], dict[str, object]]) -> None:
        self._look, self._then, self._stepped = look, look(), False

    def after_step(self) -> None:
        """Add the values that the first step has made: a cache is filled once."""
        if not self._stepped:
            self._then, self._stepped = {**self._look(), **self._then}, True

    def changed(self, saved: Collection[object] = (), most: int = 3) -> list[str]:
        """Return the first names whose values differ now, except those whose value is one of `saved`."""
        now, kept = self._look(), [_copied(value, set(), ()) for value in saved]
        return sorted(name for name, value in self._then.items() if now.get(name, value) not in [value, *kept])[:most]


def unsaved_state(
    model: Any, more: Mapping[str, Any], internal: Collection[str] = _INTERNAL, parts: Sequence[tuple[str, Any]] | None = None
) -> dict[str, object]:
    """Return the values that can change and are not in the model's state_dict, by name.

    Args:
        more: the `recipe`, a class or a function, and objects that are compared if they or their classes are the user's.
        internal: attributes of objects that are not the user's.
        parts: of the model, by name; None takes its modules.
    """
    source = more["recipe"].__module__
    users = {name: each for name, each in [*sys.modules.items()] if name.startswith(CAPTURED) or name == source}
    functions = SimpleNamespace(**{f"{name}()": each for name, each in more.items() if isinstance(each, FunctionType)})
    more = {name: each for name, each in more.items() if {kind.__module__ for kind in type(each).__mro__} & users.keys()}
    owners = [*(model.named_modules() if parts is None else parts), *more.items(), ("", functions)]
    for name, module in users.items():
        place, kinds = name.partition(".")[2], [each for each in vars(module).values() if isinstance(each, type | FunctionType)]
        owners += [(place, module), *((f"{place}.{each.__name__}", each) for each in kinds if each.__module__ == name)]
    own = {id(owner) for _, owner in owners if not isinstance(owner, FunctionType)}  # which may have a closure
    found: dict[str, object] = {}
    if isinstance(model, nn.Module):
        state = model.state_dict(keep_vars=True)  # keeps them alive, and their ids
        own |= {id(tensor) for tensor in state.values() if isinstance(tensor, Tensor)}
        found |= {f"{name}.requires_grad": each.requires_grad for name, each in model.named_parameters()}
    for place, owner in owners:
        values = {**(vars(type(owner)) if type(owner).__module__ in users else {}), **getattr(owner, "__dict__", {})}
        if isinstance(owner, nn.Module):
            if type(owner).get_extra_state is not nn.Module.get_extra_state or isinstance(owner, LazyModuleMixin):
                continue  # a checkpoint holds what the first returns; the first batch gives the second its shape
            values |= {name: owner._buffers[name] for name in owner._non_persistent_buffers_set}
        skipped = _of_optimizers() if hasattr(owner, "param_groups") else internal
        shown = {name: value for name, value in values.items() if name not in skipped and not name.startswith("__")}
        found |= {f"{place}.{name}".lstrip("."): _copied(value, own, users) for name, value in shown.items()}
    return {name: value for name, value in found.items() if value is not None}


@functools.cache
def _of_optimizers() -> frozenset[str]:
    """Return the attributes of torch's own optimizers; an optimizer imports torch's compiler, which takes a second."""
    return frozenset({*vars(torch.optim.SGD([torch.zeros(1)])), "_opt_called", "_step_count"})


def parts_of(model: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """Return the names in the model's state_dict, with the shapes of buffers; None for lazy ones and for all others."""
    shapes = {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if not is_lazy(buffer)}
    return {name: shapes.get(name) for name in model.state_dict()}


def changed_parts(then: Mapping[str, tuple[int, ...] | None], now: Mapping[str, tuple[int, ...] | None]) -> list[str]:
    """Return the names that are new or gone, and the buffers of another shape: a built model cannot load such state."""
    resized = [name for name, shape in now.items() if shape is not None and then.get(name) not in (None, shape)]
    return sorted({*then} ^ {*now} | {*resized})


def _copied(value: Any, own: set[int], users: Collection[str], most: int = _MOST) -> object:
    """Return something that is equal while `value` is; None for what cannot be compared, or is compared or saved elsewhere."""
    try:
        return _content(value, own, users, most)
    except Exception:  # a tensor without data, an array of functions, an attribute that raises: no reason to end training
        return None


def _content(value: Any, own: set[int], users: Collection[str], most: int) -> object:
    if id(value) in own or hasattr(value, "param_groups"):
        return None
    if isinstance(value, bool | int | float | str | bytes):
        return repr(value)  # NaN equals itself
    if isinstance(value, np.ndarray | np.generic):
        value = value.reshape(-1)[:: 1 + value.size // most]
    if isinstance(value, np.ndarray | np.random.Generator | np.random.RandomState) or type(value) is Random:
        return bytes_digest(pickle.dumps(value))
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, Tensor):
        if value.requires_grad:
            return None
        if value.layout is not torch.strided:
            return id(value), value._version
        version = (id(value), value._version) if value.numel() > _MOST else ()
        if value.is_contiguous() and not (value.is_cpu and value.nbytes <= 8192 * most):
            value = value.view(-1)[:: 1 + value.numel() // _MOST]
        while value.numel() > _MOST and not value.is_contiguous():  # a view, also of an expanded tensor
            value = value.transpose(0, max(range(value.ndim), key=value.shape.__getitem__))[::2]
        return version, bytes_digest(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, nn.Module):
        tensors = [each for each in value.state_dict(keep_vars=True).values() if isinstance(each, Tensor)]
        return [_copied(tensor, own, users, most // len(tensors)) for tensor in tensors]
    if isinstance(value, FunctionType) and value.__module__ in users:
        value = [cell.cell_contents for cell in value.__closure__ or ()]
    if isinstance(value, list | tuple | deque | dict | set | frozenset) and len(value) > most:
        return len(value)
    if isinstance(value, set | frozenset):
        value = sorted(map(repr, value))
    elif type(value).__module__ in users and not isinstance(value, list | tuple | deque | dict):
        value = {**getattr(value, "__dict__", {})}
    elif isinstance(value, Iterator) and not isinstance(value, io.IOBase):
        return object()  # its place cannot be seen
    if isinstance(value, list | tuple | deque | dict):
        items = [*value.items()] if isinstance(value, dict) else enumerate(value)
        fewer = most // (2 * max(len(value), 1))  # a list may hold itself
        return [(str(key), _copied(each, own, users, fewer)) for key, each in items]
    return None
