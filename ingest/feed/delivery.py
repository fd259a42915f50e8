"""How are batches copied to a GPU while it works on earlier ones?

The thread that reads ahead copies them from pinned memory, on a stream of its own. A consumer that takes a batch makes only the
GPU wait for the copy. torch reuses pinned memory only after the copies from it are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from penstock.errors import SpecError

__all__ = ["Delivery", "wait_for"]


def wait_for(copies: torch.cuda.Event, columns: Iterable[Tensor]) -> None:
    """Make the current stream wait for the copies of a batch's columns; the calling thread does not wait."""
    for column in columns:
        stream = torch.cuda.current_stream(column.device)
        stream.wait_event(copies)
        # The copying stream allocated the memory: it must not be reused before this stream is done with it.
        column.record_stream(stream)


class Delivery:
    """Puts batches on one device, with pinned memory and a stream of its own for CUDA (and ROCm) devices.

    Raises:
        SpecError: the device does not exist.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = _existing(device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def send(self, batches: Sequence[Mapping[str, Tensor]]) -> tuple[list[dict[str, Tensor]], torch.cuda.Event | None]:
        """Start the copies of some batches, in the thread that reads ahead. The event is None if nothing must be waited for."""
        if self._stream is None:
            return [self._copied(columns) for columns in batches], None
        if any(column.is_cuda for columns in batches for column in columns.values()):
            # An augmentation worked on the GPU. Otherwise do not wait: the current stream is the one that trains.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            return [self._copied(columns) for columns in batches], self._stream.record_event()

    def as_current_device(self) -> AbstractContextManager[object]:
        """Make "cuda" mean this device in the block: a new thread begins with the first GPU."""
        return torch.cuda.device(self.device) if self._stream is not None else nullcontext()

    def _copied(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._copy(column) for name, column in columns.items()}

    def _copy(self, column: Tensor) -> Tensor:
        if self._stream is None:  # a synchronous copy: the source's memory may be reused at once
            return column.to(self.device)
        if column.is_cuda:
            column.record_stream(self._stream)  # an augmentation made it on the thread's own stream
        elif column.device.type == "cpu" and column.numel() and not column.is_pinned():
            column = column.pin_memory()
        return column.to(self.device, non_blocking=True)


def _existing(device: torch.device | str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        raise SpecError(
            f"batches cannot be put on device {str(device)!r}: {str(error).splitlines()[0]}",
            next_step="use 'cpu', or a device that torch finds on this machine",
        ) from error
