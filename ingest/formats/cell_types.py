"""Which type do the cells of a text column have? Decided from every value, block by block, in bounded memory.

A column starts as null and only ever moves towards text: null, then whole numbers, then numbers; or true/false; or dates, then
times.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["NULL_WORDS", "CellTypes", "rounds", "without_null_words"]


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


class CellTypes:
    """The type of one column, and how much of it reads as numbers."""

    def __init__(self, null_words: pa.Array = NULL_WORDS) -> None:
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

    def see(self, text: pa.Array, first_row: int) -> None:
        """Take in the next cells of the column, whose first one is row `first_row`."""
        values = without_null_words(text, self._null_words)
        present = len(values) - values.null_count
        self.values += present
        if self.kind != pa.string():
            if present:
                self._has_long = self._has_long or (self.kind in (pa.null(), pa.int64(), pa.float64()) and rounds(values))
                self.kind = next((kind for kind in _NEXT[self.kind] if _fits(values, kind)), pa.string())
                if self.kind == pa.float64() and self._has_long:
                    self.kind = pa.string()
            if self.kind != pa.string():
                self.numbers += present if self.kind in (pa.int64(), pa.float64()) else 0
                return
        is_number = pc.match_substring_regex(values, _NUMBER)
        self.numbers += pc.sum(is_number).as_py() or 0
        if self.first_text_row < 0 and (row := pc.index(is_number, False).as_py()) >= 0:
            self.first_text_row, self.first_text = first_row + row, text[row].as_py()


def rounds(text: pa.Array) -> bool:
    """Whether there is an integer that a double would round."""
    longest = pc.max(pc.binary_length(text)).as_py() or 0
    return longest >= 19 and bool(pc.any(pc.match_substring_regex(text, _LONG_INTEGER)).as_py())


def without_null_words(text: pa.Array, words: pa.Array = NULL_WORDS) -> pa.Array:
    """The cells, with those that mean "no value" made null."""
    absent = pc.is_in(text, words)
    return pc.if_else(absent, pa.scalar(None, text.type), text) if pc.any(absent).as_py() else text


def _fits(values: pa.Array, kind: pa.DataType) -> bool:
    if kind in (pa.int64(), pa.float64()) and pc.any(pc.match_substring_regex(values, _DIGITS_OF_A_NAME)).as_py():
        return False
    if kind == pa.bool_():
        return bool(pc.all(pc.match_substring_regex(values, "^(?i)(true|false)$")).as_py())
    try:
        pc.cast(pc.utf8_trim_whitespace(values), kind)
    except pa.ArrowInvalid:
        return False
    return True
