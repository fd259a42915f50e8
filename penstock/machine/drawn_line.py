"""Which lines are there of what a terminal would show, where bars draw the same line again and again?"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

__all__ = ["BAR_EVERY_S", "DrawnLine"]

BAR_EVERY_S = 5.0
"""A bar that moves is a line so often; its last state is one besides."""

_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]")
"""Of a terminal's cursor, as nested bars make them; colours end with an m."""
_UP = re.compile(r"\x1b\[[0-9]*A")


class DrawnLine:
    """What one thread has begun to print to one stream, as a terminal would show it.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._text = ""
        self._returned = False
        """The cursor is at the line's beginning: what comes next stands in place of the text."""
        self._is_bar = False
        self._is_drawn = False
        """The text is a bar that was written at once: what follows without a return of the cursor is something else."""
        self._told, self._told_s = "", 0.0

    def add(self, text: str) -> Iterator[str]:
        """Take in text; gives the lines that are ready."""
        if self._is_drawn and not text.startswith(("\r", "\n")):
            self._clear()
        *whole, rest = text.split("\n")
        for piece in whole:
            self._draw(piece)
            line, bar = self._text.rstrip(), self._is_bar
            self._clear()
            if line and not (bar and line == self._told):
                yield line
        self._draw(rest)
        self._is_drawn = bool(self._is_bar and "\r" in rest and self._text and not self._returned)
        line = self._text.rstrip()
        if self._is_bar and line and self._clock() - self._told_s >= BAR_EVERY_S:
            self._told, self._told_s = line, self._clock()
            yield line

    def _draw(self, piece: str) -> None:
        if _UP.search(piece):  # back from an inner bar, to the outer one's line
            self._clear()
        first, *others = _MOVES.sub("", piece).split("\r")
        self._put(first)
        for other in others:
            self._returned = True
            self._put(other)

    def _put(self, text: str) -> None:
        if not text:
            return
        if self._returned:
            if not self._is_bar and not self._told_s:
                self._told_s = self._clock()
            self._text, self._returned, self._is_bar = "", False, True
        self._text += text

    def _clear(self) -> None:
        self._text, self._returned, self._is_bar, self._is_drawn = "", False, False, False
