"""Which type do the cells of a text column have? Decided from every value, block by block, in bounded memory.

A column starts as null and only ever moves towards text: null, then whole numbers, then numbers; or true/false; or dates, then
times.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.ingest.columns.casts import is_rounded

__all__ = ["NULL_WORDS", "CellTypes", "NullWords"]


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

_ZERO, _SIGNS, _AFTER_ZERO = b"0"[0], np.frombuffer(b"+-", np.uint8), np.frombuffer(b"0123456789xX", np.uint8)
"""Bytes of 007, which is a name."""

_TOO_MANY_DIGITS = r"^[+-]?[0-9]{20}"

_MOST_DIGITS = 19
"""Of an integer of 64 bits."""

_BEGINS_OF_NUMBERS = pa.array([sign.encode() for sign in "0123456789+-.eE \t\r\n\v\f"])

_NUMBER = r"^\s*[+-]?([1-9][0-9]{0,18}|0)?(\.[0-9]*)?([eE][+-]?[0-9]+)?\s*$"

_MOSTLY = 0.9

_TRIED_FIRST = 16
"""Cells."""


class NullWords:
    """Words for "no value" in a column other than text."""

    def __init__(self, words: pa.Array = NULL_WORDS) -> None:
        self.words = words

    def without(self, text: pa.Array) -> pa.Array:
        """Replace cells that mean "no value" by null."""
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
        values = self._null_words.without(text)
        present = len(values) - values.null_count
        self.values += present
        if self.kind != pa.string():
            cast = None
            if present:
                of_numbers = self.kind in (pa.null(), pa.int64(), pa.float64())
                self._has_long = self._has_long or (of_numbers and is_rounded(values))
                self.kind, cast = self._next(values)
            if self.kind != pa.string():
                self.numbers += present if self.kind in (pa.int64(), pa.float64()) else 0
                return cast
        is_number = _are_numbers(values)
        self.numbers += int(np.count_nonzero(is_number))
        if self.first_text_row < 0 and (texts := values.is_valid().to_numpy(zero_copy_only=False) & ~is_number).any():
            row = int(np.argmax(texts))
            self.first_text_row, self.first_text = first_row + row, text[row].as_py()
        return None

    def _next(self, values: pa.Array) -> tuple[pa.DataType, pa.Array | None]:
        tidy = pc.utf8_trim_whitespace(values)
        if pc.any(pc.starts_with(tidy, "+")).as_py():  # which Arrow reads in fractions only
            tidy = pc.replace_substring_regex(tidy, r"^\+([0-9.])", r"\1")
        for kind in _NEXT[self.kind]:
            fits, cast = _fits(tidy, kind)
            if fits:
                if kind == pa.float64() and self._has_long:
                    return pa.string(), None
                return kind, cast if tidy.equals(values) else None
        return pa.string(), None


def _fits(values: pa.Array, kind: pa.DataType) -> tuple[bool, pa.Array | None]:
    """Whether the trimmed cells read as `kind`, and the cast cells."""
    if kind == pa.bool_():
        return bool(pc.all(pc.match_substring_regex(values, "^(?i)(true|false)$")).as_py()), None
    try:
        # A cast that fails makes an error of every cell, which takes 20 times as long as one that succeeds.
        pc.cast(values.slice(0, _TRIED_FIRST), kind)
        cast = pc.cast(values, kind)
    except pa.ArrowInvalid:
        return False, None
    return (False, None) if kind in (pa.int64(), pa.float64()) and _has_name_of_digits(values) else (True, cast)


def _has_name_of_digits(values: pa.Array) -> bool:
    """Whether a cell is like `007` or `0x1F`, or has 20 digits. By its bytes: an expression takes five times as long."""
    offsets = np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + len(values) + 1]
    codes = np.frombuffer(values.buffers()[2] or b"\0", np.uint8)
    begins = offsets[:-1] + np.isin(codes[np.minimum(offsets[:-1], len(codes) - 1)], _SIGNS)
    lengths = offsets[1:] - begins
    zeros = begins[(codes[np.minimum(begins, len(codes) - 1)] == _ZERO) & (lengths > 1)] + 1
    if np.isin(codes[zeros], _AFTER_ZERO).any():
        return True
    if lengths.max(initial=0) <= _MOST_DIGITS:
        return False
    long = pc.filter(values, pa.array(lengths > _MOST_DIGITS))
    return bool(pc.any(pc.match_substring_regex(long, _TOO_MANY_DIGITS)).as_py())


def _are_numbers(text: pa.Array) -> np.ndarray:
    """Return which cells read as numbers: bool [rows]."""
    found = _begins_with(text, _BEGINS_OF_NUMBERS).fill_null(False)
    likely = pc.match_substring_regex(pc.filter(text, found), _NUMBER)
    return pc.replace_with_mask(found, found, likely).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _begins_with(text: pa.Array, begins: pa.Array) -> pa.Array:
    """Whether a cell begins with one of `begins`, which are equally long."""
    return pc.is_in(pc.binary_slice(pc.cast(text, pa.binary()), 0, len(begins[0].as_py())), begins)
