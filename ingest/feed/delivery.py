"""How are batches copied to a GPU while it works on earlier ones?

The thread that reads ahead copies them from pinned memory, on a stream of its own. A consumer that takes a batch makes only the
GPU wait for the copy. torch reuses pinned memory only after the copies from it are done.
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
"""(scale, shift): numbers, or nested lists that broadcast over the shape of a row from its last dimension on."""


class Arrival:
    """A group of batches whose copies to a GPU were started."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, columns: Iterable[Tensor]) -> None:
        """Make the current stream wait for the copies; the calling thread does not wait.

        Args:
            columns: of the batch that is taken.
        """
        for column in columns:
            stream = torch.cuda.current_stream(column.device)
            stream.wait_event(self._event)
            # The copying stream allocated the memory: it must not be reused before this stream is done with it.
            column.record_stream(stream)


class Delivery:
    """Puts batches on one device, and converts columns to floats there.

    Args:
        device: of the batches. Pinned memory and an own stream are used for CUDA (and ROCm) devices.
        columns: of the batches.
        as_float: column name to `Scaling`: its values become float32, `values * scale + shift`.

    Raises:
        SpecError: the device does not exist; `as_float` names an unknown column, or its numbers do not fit the column's shape.
    """

    def __init__(self, device: torch.device | str, columns: Sequence[ColumnInfo], as_float: Mapping[str, Scaling]) -> None:
        self.device = _existing(device)
        known = {column.name: column for column in columns}
        self._floats = {name: _scaling_tensors(name, scaling, known, self.device) for name, scaling in as_float.items()}
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @property
    def does_nothing(self) -> bool:
        """Whether batches stay unchanged."""
        return self.device.type == "cpu" and not self._floats

    def send(self, batches: Sequence[Mapping[str, Tensor]]) -> tuple[list[dict[str, Tensor]], Arrival | None]:
        """Start the copies of some batches, in the thread that reads ahead. The second result is None if none is needed."""
        if self._stream is None:
            return [self._convert(columns) for columns in batches], None
        if any(column.is_cuda for columns in batches for column in columns.values()):
            # An augmentation worked on the GPU. Otherwise do not wait: the current stream is the one that trains.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            return [self._convert(columns) for columns in batches], Arrival(self._stream.record_event())

    def as_current_device(self) -> AbstractContextManager[object]:
        """Make "cuda" mean this device in the block: a new thread begins with the first GPU."""
        return torch.cuda.device(self.device) if self._stream is not None else nullcontext()

    def _convert(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._as_float(name, self._copy(column)) for name, column in columns.items()}

    def _copy(self, column: Tensor) -> Tensor:
        if self._stream is None:  # a synchronous copy: the source's memory may be reused at once
            return column.to(self.device)
        if column.is_cuda:
            column.record_stream(self._stream)  # an augmentation made it on the thread's own stream
        elif column.device.type == "cpu" and column.numel() and not column.is_pinned():
            column = column.pin_memory()
        return column.to(self.device, non_blocking=True)

    def _as_float(self, name: str, column: Tensor) -> Tensor:
        if name not in self._floats:
            return column
        scale, shift = self._floats[name]
        return column.to(torch.float32).mul(scale).add_(shift)


def _existing(device: torch.device | str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        raise SpecError(
            f"batches cannot be put on device {str(device)!r}: {str(error).splitlines()[0]}",
            next_step="use 'cpu', or a device that torch finds on this machine",
        ) from error


def _scaling_tensors(
    name: str, scaling: Scaling, columns: Mapping[str, ColumnInfo], device: torch.device
) -> tuple[Tensor, Tensor]:
    if name not in columns:
        raise SpecError(f"as_float names column {name!r}; the columns are {', '.join(columns)}")
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
