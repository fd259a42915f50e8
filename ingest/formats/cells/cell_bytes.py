"""What do the first, last and few more bytes of text cells rule out? Most columns of numbers need no closer look.

A regular expression or a set of words costs a cell of ten bytes more than reading it as a number does. Both are asked only of
the cells whose bytes leave a doubt, and most columns have none.
"""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa

__all__ = ["CellBytes", "WordBytes"]

_ZERO, _NINE, _POINT, _SPACE, _DELETE = 0x30, 0x39, 0x2E, 0x20, 0x7F

_LONGEST_SURE = 18
"""Digits that 64 bits hold, whatever they are."""


class WordBytes:
    """Words that mean "no value", by their first and last bytes."""

    def __init__(self, words: pa.Array) -> None:
        encoded = [word.encode() for word in words.to_pylist() if word]
        self.longest = max(map(len, encoded), default=0)
        self.first, self.last = np.zeros(256, np.bool_), np.zeros(256, np.bool_)
        for word in encoded:
            self.first[word[0]] = self.last[word[-1]] = True


class CellBytes:
    """The bytes of a column of text cells. Nulls do not count as cells.

    Args:
        text: string, one chunk.
    """

    def __init__(self, text: pa.Array) -> None:
        offsets = np.frombuffer(text.buffers()[1], np.int32)[text.offset : text.offset + len(text) + 1] if len(text) else None
        data = text.buffers()[2]
        self._data = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)
        self._starts = offsets[:-1] if offsets is not None else np.zeros(0, np.int32)
        self._ends = offsets[1:] if offsets is not None else np.zeros(0, np.int32)
        self._lengths = self._ends - self._starts
        self._filled = self._lengths > 0
        empty = len(text) - int(np.count_nonzero(self._filled))
        self._has_empty_text = empty > text.null_count

    def _byte(self, places: np.ndarray) -> np.ndarray:
        return self._data[np.minimum(places, len(self._data) - 1)]

    @functools.cached_property
    def first(self) -> np.ndarray:
        """First byte of each cell: uint8 [rows]; anything where a cell is empty."""
        return self._byte(self._starts)

    @functools.cached_property
    def last(self) -> np.ndarray:
        """Last byte of each cell: uint8 [rows]; anything where a cell is empty."""
        return self._byte(np.maximum(self._ends - 1, 0))

    @functools.cached_property
    def is_trimmed(self) -> bool:
        """Whether no cell can begin or end with a space of any kind."""
        both = [(byte > _SPACE) & (byte < _DELETE) for byte in (self.first, self.last)]
        return bool((both[0] & both[1] | ~self._filled).all())

    def may_hold(self, words: WordBytes) -> bool:
        """Whether a cell can be one of the words, or is empty text, which is one."""
        if self._has_empty_text:
            return True
        by_length = self._filled & (self._lengths <= words.longest)
        return bool((by_length & words.first[self.first] & words.last[self.last]).any())

    @functools.cached_property
    def odd_digits(self) -> np.ndarray:
        """Which cells of digits may be a name or too long for a double: bool [rows]. Of trimmed cells.

        That is `007`, `0x1F`, and whatever has 19 characters or more without a point among its first three.
        """
        signed = (self.first == ord("-")) | (self.first == ord("+"))
        begin = self._starts + signed
        digit, after = self._byte(begin), self._byte(begin + 1)
        is_digit = (after >= _ZERO) & (after <= _NINE) | (after == ord("x")) | (after == ord("X"))
        odd: np.ndarray = (digit == _ZERO) & is_digit & (self._ends - begin > 1)
        if len(self._lengths) and self._lengths.max() > _LONGEST_SURE:
            pointed = (after == _POINT) | (self._byte(begin + 2) == _POINT)
            odd |= (self._lengths > _LONGEST_SURE) & ~pointed
        return odd

    @functools.cached_property
    def may_be_number(self) -> np.ndarray:
        """Which cells can read as a number, by their first byte: bool [rows]."""
        return _BEGINS_NUMBER[self.first] & self._filled


_BEGINS_NUMBER = np.zeros(256, np.bool_)
_BEGINS_NUMBER[[*b"0123456789+-.eE", *range(_SPACE + 1), *range(_DELETE, 256)]] = True
