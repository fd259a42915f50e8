"""How are the numbers 0 .. n-1 put into a random-looking order without storing it?

A Feistel network over pairs (left, right) with left in [0, a), right in [0, b) and a*b just above n: every round adds to one
half a value looked up by the other half, which can be undone, so that the whole is a bijection of [0, a*b). Results of n or
above are sent through again ("cycle walking") until they fall below. The tables hold about sqrt(n) hashed values, so they stay
in the processor's cache: an id takes about 10 ns, and any position is computed without those before.

Short orders are stored whole, sorted by a hashed value per number: below some hundred numbers a network reaches some orders
twice as often as others, and for 9, 25 or 49 numbers only the even ones.

All of it is own integer arithmetic (ingest/splitmix.py): no library's generator can change the order during a run.
Source: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from penstock.ingest.splitmix import GOLDEN, hash_words, mix_words

__all__ = ["ROUNDS", "SMALL", "Half", "Permutation", "table"]

Ids = NDArray[np.int64]

Half = NDArray[np.uint32]

ROUNDS = 8
"""Four per half. Fewer fail the tests of tests/ingest/shuffle/test_order.py; more change nothing there."""

SMALL = 512
"""Most numbers of a stored order: 4 kB, made in some 20 us."""

_CHUNK = 1 << 14
"""Ids computed at once, so that all intermediate arrays stay in the processor's cache."""


def _hashed(key: int, size: int) -> NDArray[np.uint64]:
    """Return `size` hashed values: splitmix64 at counters 1 .. size."""
    return mix_words(np.arange(1, size + 1, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(key))


def table(key: int, size: int, below: int) -> Half:
    """Return `size` hashed values in [0, below): the upper 32 bits, reduced by multiplication."""
    value = _hashed(key, size)
    return (((value >> np.uint64(32)) * np.uint64(below)) >> np.uint64(32)).astype(np.uint32)


class Permutation:
    """A bijection of [0, size) chosen by `key`; equal arguments give the same one on every platform and in every version.

    Args:
        size: how many numbers, 1 to 2**44.
        key: 64-bit integer, for example of `hash_words`.
    """

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size <= 1 << 44:
            raise ValueError(f"cannot permute {size} numbers: the size must be 1 to 2**44")
        self.size = size
        self._stored: tuple[Ids, Ids] | None = None
        if size <= SMALL:
            order = np.argsort(_hashed(hash_words(key), size), kind="stable")
            self._stored = order, np.argsort(order, kind="stable")
            return
        left = math.isqrt(size - 1) + 1
        right = -(-size // left)
        self._left, self._right = np.uint32(left), np.uint32(right)
        # Even rounds change the left half (looked up by the right one), odd rounds the right half.
        halves = [(right, left), (left, right)]
        self._tables = [table(hash_words(key, number), *halves[number % 2]) for number in range(ROUNDS)]

    def __call__(self, positions: Ids) -> Ids:
        """Return the numbers at `positions` (int64 in [0, size)), as int64 of the same shape (n,)."""
        return self._in_chunks(positions, inverse=False)

    def inverse(self, numbers: Ids) -> Ids:
        """Return the positions of `numbers` (int64 in [0, size)), as int64 of the same shape (n,)."""
        return self._in_chunks(numbers, inverse=True)

    def _in_chunks(self, values: Ids, *, inverse: bool) -> Ids:
        if self._stored is not None:
            return self._stored[inverse].take(values)
        out = np.empty(len(values), np.int64)
        for start in range(0, len(values), _CHUNK):
            out[start : start + _CHUNK] = self._walk(values[start : start + _CHUNK], inverse)
        return out

    def _walk(self, values: Ids, inverse: bool) -> Ids:
        network = self._backward if inverse else self._forward
        out = network(values)
        outside = np.flatnonzero(out >= self.size)
        while len(outside):
            out[outside] = network(out[outside])
            outside = outside[out[outside] >= self.size]
        return out

    def _forward(self, values: Ids) -> Ids:
        left, right = self._split(values)
        for number, table in enumerate(self._tables):
            if number % 2 == 0:
                left += table.take(right)
                np.minimum(
                    left, left - self._left, out=left
                )  # modulo: below the size, the unsigned difference wraps to a huge one
            else:
                right += table.take(left)
                np.minimum(right, right - self._right, out=right)
        return self._join(left, right)

    def _backward(self, values: Ids) -> Ids:
        left, right = self._split(values)
        for number, table in reversed(list(enumerate(self._tables))):
            if number % 2 == 0:
                left -= table.take(right)
                np.minimum(left, left + self._left, out=left)
            else:
                right -= table.take(left)
                np.minimum(right, right + self._right, out=right)
        return self._join(left, right)

    def _split(self, values: Ids) -> tuple[Half, Half]:
        left = values // int(self._right)
        return left.astype(np.uint32), (values - left * int(self._right)).astype(np.uint32)

    def _join(self, left: Half, right: Half) -> Ids:
        return left.astype(np.int64) * int(self._right) + right
