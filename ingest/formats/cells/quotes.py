"""Where may a CSV file be cut, and is it sure that no quoted text reaches over the cut?

A cut is guessed from the line behind it, and proven by the reading up to it: the file's first byte is outside quotes, and a
part that begins outside them and whose quotes all open and close fields ends where the next one begins outside them, too.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools

import numpy as np

__all__ = ["QuoteCheck", "record_start"]


_LINES, _RECORDS, _LOOK_BYTES = 256, 3, 64 << 10
"""So many lines are tried, and so many records behind each, within so many bytes."""


def record_start(window: bytes, fields: int, delimiter: str, quote: str) -> int | None:
    """Return where in `window`, a part of a file, a line begins from which records have that many fields; None if nowhere."""
    start = window.find(b"\n") + 1
    for _ in range(_LINES):
        if not 0 < start < len(window):
            break
        text = window[start : start + _LOOK_BYTES].decode("utf-8", errors="replace")
        records = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quotechar=quote, strict=True)
        try:
            if {len(record) for record in itertools.islice(records, _RECORDS)} == {fields}:
                return start
        except csv.Error:
            pass
        start = window.find(b"\n", start) + 1
    return None


class QuoteCheck:
    """Reads bytes from the begin of a record on. After the last of them `is_sure` is whether they end with a record.

    It is also false where that cannot be known, as of a quote in the middle of a field.
    """

    def __init__(self, delimiter: str, quote: str) -> None:
        self._quote = quote.encode()
        self._edge = np.zeros(256, np.bool_)
        self._edge[[*b"\r\n", ord(delimiter)]] = True
        self._is_open = False
        self._fits = True
        self._before = b"\n"
        """The byte before `_pending`."""
        self._pending = b""
        """A byte that is judged by the one after it."""

    def see(self, block: bytes) -> None:
        """Take the next bytes; empty at the end."""
        if self._before == b"\n" and not self._pending:
            block = block.removeprefix(codecs.BOM_UTF8)
        if not self._fits:
            return
        window = self._before + self._pending + (block or b"\n")
        if len(window) < 3:
            self._pending = window[1:]
            return
        if self._quote in window:
            self._judge(np.frombuffer(window, np.uint8))
        self._before, self._pending = window[-2:-1], window[-1:]

    @property
    def is_sure(self) -> bool:
        """Whether the bytes end with a record."""
        return self._fits and not self._is_open

    def _judge(self, codes: np.ndarray) -> None:
        quote = self._quote[0]
        places = np.flatnonzero(codes[1:-1] == quote) + 1
        if not len(places):
            return
        opens = (np.arange(len(places)) + self._is_open) % 2 == 0
        before, after = codes[places - 1], codes[places + 1]
        # Of two in a row the second one opens again what the first one closed: together they are a quote in the text.
        beside = np.where(opens, before, after)
        self._fits = bool((self._edge[beside] | (beside == quote)).all())
        self._is_open ^= bool(len(places) % 2)
