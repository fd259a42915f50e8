"""Where lies a snapshot that another process is to write? In memory that both of them see."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["SnapshotMemory"]

_ALIGN_BYTES = 64
_FIRST_BYTES = 1 << 20


class SnapshotMemory:
    """Memory for tensors, given out piece by piece and taken back all at once. It only grows, so it is faulted in once.

    Linux only. For one thread at a time. Another process maps the file descriptor `fd`.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("penstock-snapshot")
        self.size_bytes = 0
        self._map: mmap.mmap | None = None
        self._used_bytes = 0
        self._pieces: dict[int, tuple[int, Tensor]] = {}  # held, so that no other tensor gets their addresses

    def clear(self) -> None:
        """Take all pieces back: their content is no longer theirs."""
        self._used_bytes = 0
        self._pieces.clear()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of arbitrary content. Its memory stays mapped as long as the tensor lives."""
        count = math.prod(shape)
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        first = self._used_bytes
        self._used_bytes += math.ceil(count * dtype.itemsize / _ALIGN_BYTES) * _ALIGN_BYTES
        if self._map is None or self._used_bytes > self.size_bytes:
            self._grow()
        assert self._map is not None
        piece = torch.frombuffer(self._map, dtype=dtype, count=count, offset=first)
        self._pieces[piece.data_ptr()] = first, piece
        return piece.view(tuple(shape))

    def place(self, tensor: Tensor) -> int:
        """Where a tensor's bytes begin, counted from the start of the memory; one that is not from here is copied to it."""
        if not tensor.numel():
            return 0
        if tensor.data_ptr() not in self._pieces or not tensor.is_contiguous():
            tensor = self.empty(tensor.shape, tensor.dtype).copy_(tensor)
        return self._pieces[tensor.data_ptr()][0]

    def close(self) -> None:
        """Give the memory back, once no tensor uses it."""
        self.clear()
        self._map = None
        os.close(self.fd)

    def _grow(self) -> None:
        # Pieces given out before keep the smaller mapping, which shows the same memory.
        self.size_bytes = max(2 * self.size_bytes, self._used_bytes, _FIRST_BYTES)
        os.ftruncate(self.fd, self.size_bytes)
        self._map = mmap.mmap(self.fd, self.size_bytes)
