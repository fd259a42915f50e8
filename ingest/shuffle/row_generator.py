"""Which random numbers does the augmentation of a row get? Numbers that follow from (seed, epoch, row) alone.

A row draws the same numbers in any batch, rank or attempt, so that its augmentation is the same after a resume and on another
number of workers. The generator has no state to save.
Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, for numbers as a function of a counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.ingest.splitmix import GOLDEN, hash_words, mix_words

__all__ = ["RowGenerator"]

_AUGMENT = 4  # purpose of the numbers, part of their key; the keys of permutations have more words

_CHUNK = 1 << 14
"""Numbers computed at once, so that they stay in the processor's cache."""


class RowGenerator:
    """Draws own random numbers for each row of a batch; methods are named as in `numpy.random.Generator`.

    Args:
        seed: of the run.
        epoch: each has other numbers.
        row_ids: int64 [rows], distinct within an epoch: numbers in the split, or positions in an epoch that repeats rows.
    """

    def __init__(self, seed: int, epoch: int, row_ids: NDArray[np.int64]) -> None:
        base = np.uint64(hash_words(seed, epoch, _AUGMENT))
        self._keys = mix_words((row_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN) + base)
        self._drawn = 0

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return len(self._keys)

    def random(self, *size: int) -> Tensor:
        """Draw uniform numbers in [0, 1): float32 [rows, *size], on the CPU."""
        out = np.empty((len(self._keys), *size), np.float32)
        self._draw(out, lambda bits: (bits >> np.uint64(40)) * np.float32(2.0**-24))
        return torch.from_numpy(out)

    def normal(self, *size: int) -> Tensor:
        """Draw standard normal numbers: float32 [rows, *size], on the CPU."""
        out = np.empty((len(self._keys), *size), np.float32)
        self._draw(out, _normal)
        return torch.from_numpy(out)

    def integers(self, low: int, high: int, *size: int) -> Tensor:
        """Draw equally likely integers in [low, high): int64 [rows, *size], on the CPU.

        Raises:
            ValueError: the range is empty, or holds more than 2**32 integers.
        """
        if not 0 < high - low <= 1 << 32:
            raise ValueError(f"integers({low}, {high}): there must be 1 to 2**32 integers from low to below high")
        out = np.empty((len(self._keys), *size), np.int64)
        self._draw(out, lambda bits: (bits % np.uint64(high - low)).astype(np.int64) + low)
        return torch.from_numpy(out)

    def _draw(self, out: NDArray[Any], convert: Callable[[NDArray[np.uint64]], NDArray[Any]]) -> None:
        """Fill `out` [rows, ...] from 64 bits for each number: splitmix64 of each row's key, continued over the draws."""
        numbers = out.reshape(len(out), -1) if out.size else out.reshape(0, 1)
        count = math.prod(out.shape[1:])
        first, self._drawn = self._drawn, self._drawn + count
        rows, columns = max(1, _CHUNK // max(1, count)), min(count, _CHUNK) or 1
        for row in range(0, len(numbers), rows):
            for column in range(0, count, columns):
                part = numbers[row : row + rows, column : column + columns]
                steps = np.arange(part.shape[1], dtype=np.uint64) + np.uint64(first + column + 1)
                bits = self._keys[row : row + rows, None] + steps * np.uint64(GOLDEN)
                part[:] = convert(mix_words(bits))


def _normal(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Apply Box and Muller's transform to both halves of each; in float64, whose last bits do not reach float32."""
    radius = np.sqrt(-2.0 * np.log1p(-(bits >> np.uint64(32)).astype(np.float64) * 2.0**-32))
    turn = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) * 2.0**-32
    return radius * np.cos(2.0 * math.pi * turn)  # type: ignore[no-any-return]
