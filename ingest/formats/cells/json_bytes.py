"""What do the bytes of JSON lines show, without a look at each line: long integers, and how many lines are there?"""

from __future__ import annotations

import re

import numpy as np

__all__ = ["count_lines", "has_long_integer"]


_SPACE, _ZERO, _POINT, _LINE_END = b" 0.\n"

_LONG_DIGITS = 16
"""A double holds every integer of fewer digits."""

_INTEGER = re.compile(rb"[0-9]{16,}(?![0-9.eE])")


def has_long_integer(text: bytes) -> bool:
    """Whether there are 16 digits or more of no fraction: all integers that a double may round, and some others."""
    codes = np.frombuffer(text, np.uint8)
    digits = codes - np.uint8(_ZERO) < 10
    run, size = digits, 1
    while size < _LONG_DIGITS:  # runs of twice the digits begin where two runs meet
        run, size = run[:-size] & run[size:], 2 * size
    if not run.any():
        return False
    begins = run.copy()
    begins[1:] &= ~digits[: len(run) - 1]
    places = np.flatnonzero(begins)
    whole = places[codes[np.maximum(places - 1, 0)] != _POINT]
    return any(_INTEGER.match(text, place) for place in whole.tolist())


def count_lines(text: bytes) -> tuple[int, int]:
    """Return (lines that are not blank, line ends)."""
    codes = np.frombuffer(text, np.uint8)
    ends = codes == _LINE_END
    num_ends = int(np.count_nonzero(ends))
    behind = codes[1:][ends[:-1]]
    if len(codes) and codes[0] > _SPACE and (behind > _SPACE).all():
        return num_ends + (not text.endswith(b"\n")), num_ends
    return sum(1 for line in text.split(b"\n") if line.strip()), num_ends
