"""What does chance decide for a row? Numbers that follow from (seed, epoch, row) alone.

Whatever batch, rank or attempt a row is read in, it draws the same numbers: an augmentation made of them is the same after a
resume and on another number of workers. Nothing is kept between batches, so there is nothing to save.
Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, for numbers that are a function of a counter.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ingest.splitmix import GOLDEN, hash_words, mix_words

__all__ = ["RowGenerator"]

_AUGMENT = 4  # what the numbers are for; orders use 1 to 3
_CHUNK = 1 << 14
"""Numbers made at once, so that they stay in the processor's cache."""


class RowGenerator:
    """Draws random numbers for the rows of one batch, each row its own; methods are named as in `numpy.random.Generator`.

    Args:
        seed: of the run.
        epoch: rows draw anew in each.
        row_ids: int64 [rows], the rows' numbers in their split.
    """

    def __init__(self, seed: int, epoch: int, row_ids: NDArray[np.int64]) -> None:
        base = np.uint64(hash_words(seed, epoch, _AUGMENT))
        self._keys = mix_words((row_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN) + base)
        self._drawn = 0

    def random(self, *size: int) -> Tensor:
        """Uniform numbers in [0, 1): float32 [rows, *size], on the CPU."""
        return torch.from_numpy(self._uniform(size, np.float32(2.0**-24)))

    def normal(self, *size: int) -> Tensor:
        """Standard normal numbers: float32 [rows, *size], on the CPU."""
        radius = np.sqrt(-2.0 * np.log1p(-self._uniform(size, np.float32(2.0**-24))))
        return torch.from_numpy(radius * np.cos(self._uniform(size, np.float32(2.0**-24 * 2.0 * math.pi))))

    def integers(self, low: int, high: int, *size: int) -> Tensor:
        """Integers in [low, high), all as likely: int64 [rows, *size], on the CPU.

        Raises:
            ValueError: no integer lies between, or more than 2**32 do.
        """
        if not 0 < high - low <= 1 << 32:
            raise ValueError(f"integers({low}, {high}): there must be 1 to 2**32 integers from low to below high")
        bits = self._bits(size) >> np.uint64(32)
        return torch.from_numpy(((bits * np.uint64(high - low)) >> np.uint64(32)).astype(np.int64) + low)

    def _uniform(self, size: tuple[int, ...], unit: np.float32) -> NDArray[np.float32]:
        return (self._bits(size) >> np.uint64(40)).astype(np.float32) * unit

    def _bits(self, size: tuple[int, ...]) -> NDArray[np.uint64]:
        """64 random bits for each number of [rows, *size]: splitmix64 of each row's key, continued over the draws."""
        count = math.prod(size)
        steps = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        self._drawn += count
        bits = np.empty((len(self._keys), count), np.uint64)
        rows = max(1, _CHUNK // max(1, count))
        for first in range(0, len(bits), rows):
            part = bits[first : first + rows]
            np.add(self._keys[first : first + rows, None], steps, out=part)
            mix_words(part)
        return bits.reshape(len(self._keys), *size)
