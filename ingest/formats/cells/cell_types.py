"""Which type do the cells of a text column have? Decided from every value, block by block, in bounded memory.

A column starts as null and only ever moves towards text: null, then whole numbers, then numbers; or true/false; or dates, then
times.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.ingest.formats.cells.cell_bytes import CellBytes, WordBytes

__all__ = ["NULL_WORDS", "CellTypes", "NullWords", "rounds"]


NULL_WORDS = pa.array(
    [
        *("", "NA", "N/A", "n/a", "#NA", "#N/A", "NULL", "null"),
        *("NaN", "nan", "-NaN", "-nan", "1.#QNAN", "-1.#QNAN", "1.#IND", "-1.#IND"),
    ]
)
"""Words for "no value" in a column of numbers, times or truth values; in a column of text they are text (NA is Namibia)."""

_UNITS = ("s", "us", "ns")

_STAMPS = tuple(pa.timestamp(unit) for unit in _UNITS)

_ZONED = tuple(pa.timestamp(unit, "UTC") for unit in _UNITS)
"""Of text with a zone (`Z`, `+02:00`), which times without one do not mix with."""

_NEXT: dict[pa.DataType, tuple[pa.DataType, ...]] = {
    pa.null(): (pa.int64(), pa.float64(), pa.bool_(), pa.date32(), *_STAMPS, *_ZONED),
    pa.int64(): (pa.int64(), pa.float64()),
    pa.float64(): (pa.float64(),),
    pa.bool_(): (pa.bool_(),),
    pa.date32(): (pa.date32(), *_STAMPS),
    **{kinds[at]: kinds[at:] for kinds in (_STAMPS, _ZONED) for at in range(len(_UNITS))},
}

_DIGITS_OF_A_NAME = r"^\s*[+-]?(0[0-9xX]|[0-9]{20})"
"""007 is a name, not a number, and so are 20 digits."""

_LONG_INTEGER = r"^\s*[+-]?[0-9]{19}\s*$"
"""What 64 bits hold and a double would round."""

_NUMBER = r"^\s*[+-]?([1-9][0-9]{0,18}|0)?(\.[0-9]*)?([eE][+-]?[0-9]+)?\s*$"

_MOSTLY = 0.9

_TRIED_FIRST = 16
"""Cells."""


class NullWords:
    """Words for "no value" in a column other than text."""

    def __init__(self, words: pa.Array = NULL_WORDS) -> None:
        self.words = words
        self._bytes = WordBytes(words)

    def without(self, text: pa.Array, cells: CellBytes | None = None) -> pa.Array:
        """Replace cells that mean "no value" by null."""
        if not (cells or CellBytes(text)).may_hold(self._bytes):
            return text
        absent = pc.is_in(text, self.words)
        return pc.if_else(absent, pa.scalar(None, text.type), text) if pc.any(absent).as_py() else text


class CellTypes:
    """The type of one column, and how much of it reads as numbers."""

    def __init__(self, null_words: NullWords) -> None:
        self._null_words = null_words
        self._has_long = False
        self.kind: pa.DataType = pa.null()
        self.values = 0
        self.numbers = 0
        self.first_text_row = -1
        self.first_text: str | None = None

    @property
    def is_mostly_numbers(self) -> bool:
        """Whether nine values of ten are numbers: then the rest is more likely a fault than text."""
        return self.values > self.numbers >= self.values * _MOSTLY

    def see(self, text: pa.Array, first_row: int) -> pa.Array | None:
        """Take the next cells of the column, whose first one is row `first_row`.

        Returns:
            The cells in the type that the column has now, if they were cast as they are to find it; else None.
        """
        cells = CellBytes(text)
        values = self._null_words.without(text, cells)
        cells = cells if values is text else CellBytes(values)
        present = len(values) - values.null_count
        self.values += present
        if self.kind != pa.string():
            cast = None
            if present:
                of_numbers = self.kind in (pa.null(), pa.int64(), pa.float64())
                self._has_long = self._has_long or (of_numbers and rounds(values, cells))
                self.kind, cast = self._next(values, cells)
            if self.kind != pa.string():
                self.numbers += present if self.kind in (pa.int64(), pa.float64()) else 0
                return cast
        is_number = _are_numbers(values, cells)
        self.numbers += int(np.count_nonzero(is_number))
        if self.first_text_row < 0 and (texts := values.is_valid().to_numpy(zero_copy_only=False) & ~is_number).any():
            row = int(np.argmax(texts))
            self.first_text_row, self.first_text = first_row + row, text[row].as_py()
        return None

    def _next(self, values: pa.Array, cells: CellBytes) -> tuple[pa.DataType, pa.Array | None]:
        for kind in _NEXT[self.kind]:
            fits, cast = _fits(values, cells, kind)
            if fits:
                return (pa.string(), None) if kind == pa.float64() and self._has_long else (kind, cast)
        return pa.string(), None


def rounds(text: pa.Array, cells: CellBytes) -> bool:
    """Whether there is an integer that a double would round."""
    return _any_like(text, cells, _LONG_INTEGER)


def _any_like(text: pa.Array, cells: CellBytes, pattern: str) -> bool:
    """Whether a cell is like `pattern`, which is about digits without a point; only those in doubt are compared."""
    if cells.is_trimmed:
        if not cells.odd_digits.any():
            return False
        text = pc.filter(text, pa.array(cells.odd_digits))
    return bool(pc.any(pc.match_substring_regex(text, pattern)).as_py())


def _are_numbers(text: pa.Array, cells: CellBytes) -> np.ndarray:
    """Return which cells read as numbers: bool [rows]."""
    found = cells.may_be_number.copy()
    doubtful = pc.filter(text, pa.array(found))
    found[found] = pc.match_substring_regex(doubtful, _NUMBER).fill_null(False).to_numpy(zero_copy_only=False)
    return found


def _fits(values: pa.Array, cells: CellBytes, kind: pa.DataType) -> tuple[bool, pa.Array | None]:
    """Whether the cells read as `kind`, and the cast cells if they were cast as they are."""
    if kind in (pa.int64(), pa.float64()) and _any_like(values, cells, _DIGITS_OF_A_NAME):
        return False, None
    if kind == pa.bool_():
        return bool(pc.all(pc.match_substring_regex(values, "^(?i)(true|false)$")).as_py()), None
    trimmed = values if cells.is_trimmed else pc.utf8_trim_whitespace(values)
    try:
        # A cast that fails makes an error of every cell, which takes 20 times as long as one that succeeds.
        pc.cast(trimmed.slice(0, _TRIED_FIRST), kind)
        cast = pc.cast(trimmed, kind)
    except pa.ArrowInvalid:
        return False, None
    return True, cast if trimmed is values else None
