"""How is state copied, so that training goes on meanwhile? From the CPU at once, from a GPU while that works on.

A GPU's goes into pinned memory, which the GPU writes by itself: only the reader of the copy waits. What the GPU is asked to
do later comes after the copies, so they hold what was there when they were asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["after_copy", "copied", "host_memory"]


T = TypeVar("T")

_log = logging.getLogger(__name__)


def copied(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU. Of a GPU's tensor it is only on its way: see `after_copy`."""
    source = tensor.detach()
    if source.is_cuda:
        source = source.resolve_conj().resolve_neg()  # the GPU's part: a lazy one would be done here, and too early
    if not source.is_cuda or source.layout is not torch.strided:
        return source.to("cpu", copy=True).contiguous()
    copy = host_memory(source.shape, source.dtype, like=[source])
    return copy.copy_(source.contiguous(), non_blocking=True)


def after_copy(value: T, device: torch.device) -> Callable[[], T]:
    """A function, for any thread, that waits for the copies from `device` asked for so far by this one, and returns `value`."""
    if device.type != "cuda":
        return lambda: value
    event = torch.cuda.current_stream(device).record_event()

    def arrived() -> T:
        event.synchronize()
        return value

    return arrived


def host_memory(shape: Sequence[int], dtype: torch.dtype, like: Iterable[Tensor]) -> Tensor:
    """CPU memory of arbitrary content; pinned if a tensor of `like` lies on a GPU, and there is so much to pin."""
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
    """In deterministic mode torch fills fresh memory, which takes longer than the copy that comes into it."""
    mode: Any = torch.utils.deterministic
    fills = mode.fill_uninitialized_memory
    mode.fill_uninitialized_memory = False
    try:
        yield
    finally:
        mode.fill_uninitialized_memory = fills
