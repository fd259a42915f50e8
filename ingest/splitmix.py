"""How are integers hashed to 64 random-looking bits, the same in every version of every library? As splitmix64 does it.

Source: G. Steele et al., "Fast splittable pseudorandom number generators", 2014.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["GOLDEN", "hash_words", "mix_words"]

GOLDEN = 0x9E3779B97F4A7C15
"""The increment of splitmix64's counter, modulo 2**64."""

_MASK = (1 << 64) - 1
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def hash_words(*words: int) -> int:
    """Hash integers (each taken modulo 2**64) to one 64-bit integer."""
    state = 0
    for word in words:
        state = (state + GOLDEN + (word & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * _FACTORS[0]) & _MASK
        state = ((state ^ (state >> 27)) * _FACTORS[1]) & _MASK
        state ^= state >> 31
    return state


def mix_words(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix every number of a uint64 array in place, and return the array: a bijection in which each bit changes half of them."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(_FACTORS[0])
    values ^= values >> np.uint64(27)
    values *= np.uint64(_FACTORS[1])
    values ^= values >> np.uint64(31)
    return values
