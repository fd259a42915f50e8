"""How is a tree of tensors kept as one block of bytes?

An optimizer of a small network has dozens of tensors, and to keep each by itself costs more than to copy it: a checkpoint holds
one, the block, and beside it a small tree of numbers and names that says what lies where.
"""

from __future__ import annotations

import copy
import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.training.checkpoint.host_copy import host_memory

__all__ = ["pack", "unpack"]


_PLACE = "\0tensor"
"""In the tree, `{_PLACE: index}` stands where a tensor was."""

_ALIGN_BYTES = 64

_PADDING = torch.zeros(_ALIGN_BYTES, dtype=torch.uint8)


def pack(value: Any) -> dict[str, Any]:
    """Copy a tree of dicts, lists and tuples, and every tensor in it to the CPU; later changes do not reach the copy.

    What lies on a GPU is only on its way when this returns: see `penstock.training.checkpoint.host_copy`.

    Returns:
        `tree`, `layout` (JSON: dtype and shape of each tensor) and `bytes` (uint8[n]): what torch.load reads with
        weights_only=True, if it reads the tree's other leaves.
    """
    found: list[Tensor] = []
    tree = _without_tensors(value, found)
    layout = [(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in found]
    return {"tree": tree, "layout": json.dumps(layout), "bytes": _one_block(found, layout)}


def _one_block(tensors: list[Tensor], layout: Iterable[tuple[str, Sequence[int]]]) -> Tensor:
    block = host_memory([sum(_room(tensor.nbytes) for tensor in tensors)], torch.uint8, like=tensors)
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
    """The tree again.

    Each tensor gets memory of its own: one small number must not keep the block alive, and torch 2.13 sets a generator (a
    module may keep one in its extra state) from where a tensor's storage begins, wherever in it the tensor does.
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
