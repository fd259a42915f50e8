"""How do batches reach the device that learns from them, while it learns from others?

On a GPU the thread that reads ahead copies them, from pinned memory and on a stream of its own. Taking a batch lets the GPU
wait for that copy, nothing else. Pinned memory comes from torch, which hands a piece out again only when the copies from it
are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from penstock.errors import SpecError
from penstock.ingest.schema import ColumnInfo

__all__ = ["Arrival", "Delivery", "Scaling"]


Scaling = tuple[Any, Any]
"""(scale, shift): numbers, or nested lists that broadcast over one row's shape from its last dimension on."""


class Arrival:
    """Batches on their way to a GPU."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, columns: Iterable[Tensor]) -> None:
        """Let what the calling thread asks of the GPU from now on come after the copies; the thread itself goes on.

        Args:
            columns: of the batch that is taken, on the stream that will use it.
        """
        for column in columns:
            stream = torch.cuda.current_stream(column.device)
            stream.wait_event(self._event)
            # Allocated on the copying stream: the memory must not be given away before this stream, too, is done with it.
            column.record_stream(stream)


class Delivery:
    """Puts batches on one device, and turns columns into floats there.

    Args:
        device: where batches go. Pinned memory and a stream of its own are for CUDA (and ROCm) devices.
        columns: of the batches.
        as_float: column name to `Scaling`: its values become float32, `values * scale + shift`.

    Raises:
        SpecError: there is no such device; `as_float` names an unknown column, or its numbers do not fit the column's shape.
    """

    def __init__(self, device: torch.device | str, columns: Sequence[ColumnInfo], as_float: Mapping[str, Scaling]) -> None:
        self.device = _found(device)
        known = {column.name: column for column in columns}
        self._floats = {name: _checked(name, scaling, known, self.device) for name, scaling in as_float.items()}
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @property
    def does_nothing(self) -> bool:
        """Whether batches stay as they are."""
        return self.device.type == "cpu" and not self._floats

    def send(self, batches: Sequence[Mapping[str, Tensor]]) -> tuple[list[dict[str, Tensor]], Arrival | None]:
        """Start to copy the columns of some batches, in the thread that reads ahead; None where they are there already."""
        if self._stream is None:
            return [self._made(columns) for columns in batches], None
        if any(column.is_cuda for columns in batches for column in columns.values()):
            # An augmentation worked on the GPU. Else nothing is waited for: this thread's stream is the one that learns.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            return [self._made(columns) for columns in batches], Arrival(self._stream.record_event())

    def here(self) -> AbstractContextManager[object]:
        """What asks for "cuda" in the block gets this device: a thread begins with the first one."""
        return torch.cuda.device(self.device) if self._stream is not None else nullcontext()

    def _made(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._as_float(name, self._copied(column)) for name, column in columns.items()}

    def _copied(self, column: Tensor) -> Tensor:
        if self._stream is None:  # not ahead of anything: the memory it comes from may be used again at once
            return column.to(self.device)
        if column.is_cuda:
            column.record_stream(self._stream)  # made on the thread's own stream, by an augmentation
        elif column.device.type == "cpu" and column.numel() and not column.is_pinned():
            column = column.pin_memory()
        return column.to(self.device, non_blocking=True)

    def _as_float(self, name: str, column: Tensor) -> Tensor:
        if name not in self._floats:
            return column
        scale, shift = self._floats[name]
        return column.to(torch.float32).mul(scale).add_(shift)


def _found(device: torch.device | str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        raise SpecError(
            f"batches cannot be put on device {str(device)!r}: {str(error).splitlines()[0]}",
            next_step="take 'cpu', or a device that torch sees here",
        ) from error


def _checked(name: str, scaling: Scaling, columns: Mapping[str, ColumnInfo], device: torch.device) -> tuple[Tensor, Tensor]:
    if name not in columns:
        raise SpecError(f"as_float names column {name!r}; there are {', '.join(columns)}")
    shape = columns[name].shape
    try:
        scale, shift = (torch.as_tensor(numbers, dtype=torch.float32, device=device) for numbers in scaling)
        if any(torch.broadcast_shapes(numbers.shape, shape) != torch.Size(shape) for numbers in (scale, shift)):
            raise ValueError("too many numbers")
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecError(
            f"as_float of column {name!r} is {scaling!r}: {error}",
            next_step=f"give a scale and a shift that fit a row's shape {list(shape)}",
        ) from error
    return scale, shift
