"""Which type do the cells of a text column have? Decided from every value, block by block, in bounded memory.

A column starts as null and only ever moves towards text: null, then whole numbers, then numbers; or true/false; or dates, then
times.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.ingest.columns.casts import is_rounded

__all__ = ["NULL_WORDS", "CellTypes", "missing_advice", "without_words"]

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

_ZERO = b"0"[0]

_SIGNS, _AFTER_ZERO = (np.isin(np.arange(256), np.frombuffer(codes, np.uint8)) for codes in (b"+-", b"0123456789xX"))
"""Bytes of 007, which is a name: bool [256] each."""

_TOO_MANY_DIGITS = r"^[+-]?[0-9]{20}"

_MOST_DIGITS = 19
"""Of an integer of 64 bits."""

_NUMBER = r"^\s*[+-]?([1-9][0-9]{0,18}|0)?(\.[0-9]*)?([eE][+-]?[0-9]+)?\s*$"

_MOSTLY = 0.9

_TRIED_FIRST = 16
"""Cells."""


def missing_advice(words: list[str]) -> str:
    """Advise what to do about cells of CSV that do not fit their column; `words` are in quotes."""
    nulls = f"data.csv: {{nulls: [{', '.join(dict.fromkeys(words))}]}}, data.invalid: drop"
    return f"correct the cells, or count them as missing and leave their rows out: {nulls}"


def without_words(text: pa.Array, words: pa.Array) -> pa.Array:
    """Replace cells of a column other than text that mean "no value" by null."""
    absent = pc.is_in(text, words)
    return pc.if_else(absent, pa.scalar(None, text.type), text) if pc.any(absent).as_py() else text


class CellTypes:
    """The type of one column, and how much of it reads as numbers."""

    def __init__(self, null_words: pa.Array) -> None:
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
        values = without_words(text, self._null_words)
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
        tidy: pa.Array | None = None
        for kind in _NEXT[self.kind]:
            fits, cast = _fits(values, kind)
            if not fits:
                tidy = _tidied(values) if tidy is None else tidy
                fits, cast = not tidy.equals(values) and _fits(tidy, kind)[0], None
            if fits:
                return (pa.string(), None) if kind == pa.float64() and self._has_long else (kind, cast)
        return pa.string(), None


def _tidied(values: pa.Array) -> pa.Array:
    """Return the cells without the blanks around them, which no cast reads, and without plus signs, which some read."""
    tidy = pc.utf8_trim_whitespace(values)
    if not pc.any(pc.starts_with(tidy, "+")).as_py():
        return tidy
    return pc.replace_substring_regex(tidy, r"^\+([0-9.])", r"\1")


def _fits(values: pa.Array, kind: pa.DataType) -> tuple[bool, pa.Array | None]:
    """Whether the cells read as `kind` as they are, and the cast cells."""
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
    last = len(codes) - 1
    begins = offsets[:-1] + _SIGNS[codes[np.minimum(offsets[:-1], last)]]
    lengths = offsets[1:] - begins
    zeros = codes[np.minimum(begins, last)] == _ZERO
    if (zeros & (lengths > 1) & _AFTER_ZERO[codes[np.minimum(begins + 1, last)]]).any():
        return True
    if lengths.max(initial=0) <= _MOST_DIGITS:
        return False
    long = pc.filter(values, pa.array(lengths > _MOST_DIGITS))
    return bool(pc.any(pc.match_substring_regex(long, _TOO_MANY_DIGITS)).as_py())


def _are_numbers(text: pa.Array) -> np.ndarray:
    """Return which cells read as numbers: bool [rows]."""
    found = pc.match_substring_regex(text, _NUMBER).fill_null(False)
    return found.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
