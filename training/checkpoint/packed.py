"""How is state copied while training goes on, and a tree of tensors packed into one block of bytes?

A GPU copies into pinned memory by itself: only the reader of the copy waits. Its later work comes after the copies, so they
hold the state of the moment of the call. An optimizer of a small network has dozens of tensors, and storing each by itself
costs more than copying it: a checkpoint holds one block, and a small tree of numbers and names.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["after_copy", "copied", "pack", "unpack"]

T = TypeVar("T")

_log = logging.getLogger(__name__)


_PLACE = "\0tensor"
"""In the tree, `{_PLACE: index}` replaces a tensor."""

_ALIGN_BYTES = 64

_PADDING = torch.zeros(_ALIGN_BYTES, dtype=torch.uint8)


def pack(value: Any) -> dict[str, Any]:
    """Copy a tree of dicts, lists and tuples, and every tensor in it to the CPU; later changes do not reach the copy.

    Copies from a GPU are asynchronous: see `after_copy`.

    Returns:
        `tree`, `layout` (JSON: dtype and shape of each tensor) and `bytes` (uint8[n]). torch.load reads it with
        weights_only=True, if it reads the tree's other leaves.
    """
    found: list[Tensor] = []
    tree = _without_tensors(value, found)
    layout = [(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in found]
    return {"tree": tree, "layout": json.dumps(layout), "bytes": _one_block(found, layout)}


def _one_block(tensors: list[Tensor], layout: Iterable[tuple[str, Sequence[int]]]) -> Tensor:
    block = _host_memory([sum(_room(tensor.nbytes) for tensor in tensors)], torch.uint8, like=tensors)
    if tensors and all(map(_is_bytes, tensors)):  # one call for all, instead of five for each
        pieces = []
        for tensor in tensors:
            pieces += [tensor.reshape(-1).view(torch.uint8), _PADDING[: -tensor.nbytes % _ALIGN_BYTES]]
        return torch.cat(pieces, out=block)
    first = 0
    for tensor, place in zip(tensors, _views(layout, block), strict=True):
        place.copy_(tensor, non_blocking=True)
        block[first + tensor.nbytes : first + _room(tensor.nbytes)] = 0
        first += _room(tensor.nbytes)
    return block


def _is_bytes(tensor: Tensor) -> bool:
    """Whether the tensor can be seen as its bytes without a copy."""
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def unpack(packed: dict[str, Any]) -> Any:
    """Restore the tree.

    Each tensor gets its own memory: one small number must not keep the block alive, and torch 2.13 sets a generator (a module
    may keep one in its extra state) from the beginning of a tensor's storage.
    """
    views = _views(json.loads(packed["layout"]), packed["bytes"])
    return _with_tensors(packed["tree"], [view.clone() for view in views])


def _views(layout: Iterable[tuple[str, Sequence[int]]], block: Tensor) -> list[Tensor]:
    views, first = [], 0
    for name, shape in layout:
        dtype = getattr(torch, name)
        size_bytes = math.prod(shape) * dtype.itemsize
        views.append(block[first : first + size_bytes].view(dtype).view(shape))
        first += _room(size_bytes)
    return views


def _room(size_bytes: int) -> int:
    return math.ceil(size_bytes / _ALIGN_BYTES) * _ALIGN_BYTES


def _without_tensors(value: Any, found: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
        if not plain or value.is_quantized or value.is_nested:
            return value.detach().to("cpu", copy=True)
        found.append(value.detach().resolve_conj().resolve_neg() if value.is_cuda else value.detach())
        return {_PLACE: len(found) - 1}
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _without_tensors(item, found)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(item, found) for item in value)
    return copy.deepcopy(value)  # a Counter, a number, a string: kept as it is


def _with_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if type(value) is dict and value.keys() == {_PLACE}:
        return tensors[value[_PLACE]]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _with_tensors(item, tensors)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(item, tensors) for item in value)
    return value


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, contiguous. A GPU's copy is asynchronous: see `after_copy`."""
    source = tensor.detach()
    if source.is_cuda:
        source = source.resolve_conj().resolve_neg()  # on the GPU: a lazy one would be done here, too early
    if not source.is_cuda or source.layout is not torch.strided:
        return source.to("cpu", copy=True).contiguous()
    copy = _host_memory(source.shape, source.dtype, like=[source])
    return copy.copy_(source.contiguous(), non_blocking=True)


def after_copy(value: T, device: torch.device) -> Callable[[], T]:
    """Make a function, for any thread, that waits for this thread's copies from `device` so far and returns `value`."""
    if device.type != "cuda":
        return lambda: value
    event = torch.cuda.current_stream(device).record_event()

    def arrived() -> T:
        event.synchronize()
        return value

    return arrived


def _host_memory(shape: Sequence[int], dtype: torch.dtype, like: Iterable[Tensor]) -> Tensor:
    """Allocate CPU memory of arbitrary content; pinned if a tensor of `like` is on a GPU and so much can be pinned."""
    make = partial(torch.empty, tuple(shape), dtype=dtype, device="cpu")
    with _unfilled():
        if any(tensor.is_cuda for tensor in like):
            try:
                return make(pin_memory=True)
            except RuntimeError:
                _log.warning("no memory can be pinned for a copy of the training state: training waits while it is copied")
        return make()


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
