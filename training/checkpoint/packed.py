"""How is a tree of tensors copied while training goes on?

A GPU copies into pinned memory by itself: only the reader of the copy waits. Its later work comes after the copies, so they
hold the state of the moment of the call.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["after_copy", "copied", "pack", "unpack"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_PLACE = "\0tensor"
"""In the tree, `{_PLACE: name}` replaces a tensor."""


def pack(value: Any) -> dict[str, Any]:
    """Copy a tree of dicts, lists and tuples, and every tensor in it to the CPU; later changes do not reach the copy.

    Copies from a GPU are asynchronous: see `after_copy`.

    Returns:
        `tree`, which torch.load reads with weights_only=True if it reads the other leaves, and `tensors`, by name.
    """
    tensors: dict[str, Tensor] = {}
    return {"tree": _without_tensors(value, tensors), "tensors": tensors}


def unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Restore the tree."""
    if type(tree) is dict and tree.keys() == {_PLACE}:
        return tensors[tree[_PLACE]]
    if type(tree) in (dict, OrderedDict):
        return type(tree)((key, unpack(item, tensors)) for key, item in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(unpack(item, tensors) for item in tree)
    return tree


def _without_tensors(value: Any, found: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
        if not plain or value.is_quantized or value.is_nested or value.dtype is torch.complex128:  # not safetensors'
            return value.detach().to("cpu", copy=True)
        found[name := f"training.{len(found)}"] = copied(value)
        return {_PLACE: name}
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({_plain(key): _without_tensors(item, found) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(item, found) for item in value)
    return copy.deepcopy(_plain(value))


def _plain(value: Any) -> Any:
    """Return the value, or for a number of numpy, which a schedule may compute, that of Python which acts alike."""
    return value.item() if isinstance(value, np.float64 | np.integer | np.bool_) else value


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, contiguous. A GPU's copy is asynchronous: see `after_copy`."""
    source = tensor.detach()
    if source.layout is not torch.strided:
        return source.to("cpu", copy=True)
    source = source.resolve_conj().resolve_neg().contiguous()
    with _unfilled():
        return _host_memory(source.shape, source.dtype, source.is_cuda).copy_(source, non_blocking=True)


def after_copy(value: T, device: torch.device) -> Callable[[], T]:
    """Make a function, for any thread, that waits for this thread's copies from `device` so far and returns `value`."""
    if device.type != "cuda":
        return lambda: value
    event = torch.cuda.current_stream(device).record_event()

    def arrived() -> T:
        event.synchronize()
        return value

    return arrived


def _host_memory(shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> Tensor:
    """Allocate CPU memory of arbitrary content, pinned if so much can be pinned."""
    try:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned)
    except RuntimeError:
        if not pinned:
            raise
        _log.warning("no memory can be pinned for a copy of the training state: training waits while it is copied")
        return _host_memory(shape, dtype, False)


@contextmanager
def _unfilled() -> Iterator[None]:
    """Keep torch from filling fresh memory in deterministic mode, which takes longer than the copy into it."""
    mode: Any = torch.utils.deterministic
    fills = mode.fill_uninitialized_memory
    mode.fill_uninitialized_memory = False
    try:
        yield
    finally:
        mode.fill_uninitialized_memory = fills
