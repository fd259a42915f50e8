"""How does JSON that is not one object a line, but one array or objects over several lines, become lines of one object each?

The text of an object is kept as it is, so integers stay exact, but for its line breaks: within JSON they can only be between
values. About a block is in memory at once, and never less than one object.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from penstock.errors import DataError
from penstock.messages import shorten

__all__ = ["Block", "object_lines", "spans_lines"]

_OBJECT_CHARS = 1 << 29
"""An object is refused beyond so many: a file that never ends its first one does not hold rows."""

_CUT_CHARS = 16
"""An error so near to the end of what was read may come from the end, such as half an escape, or of `true`."""

_BLANK = re.compile(r"[ \t\r\n]*")


class Block(NamedTuple):
    """Some objects, one a line."""

    text: bytes
    lines: range | list[int]
    """The line of the file, from 1, that each line of `text` begins at; blank lines of it hold no object."""
    rows: int


def spans_lines(head: bytes) -> bool:
    """Whether a file that begins so is an array, or objects over several lines: its first line then ends within a value."""
    line = head.lstrip(b"\xef\xbb\xbf \t\r\n").split(b"\n", 1)[0].rstrip()
    return line.startswith(b"[") or (line.startswith(b"{") and line.endswith((b"{", b"[", b",", b":")))


def object_lines(uri: str, head: bytes, stream: pa.NativeFile, block_bytes: int) -> Iterator[Block]:
    """Yield the objects of one array, or those that follow one another.

    Args:
        head: what was read of the stream already.

    Raises:
        DataError: it is not JSON, an element is not an object, or the file is cut off; names the line.
    """
    text = _Text(uri, head, stream, block_bytes)
    in_array = text.next_char() == "["
    if in_array:
        text.position += 1
    objects: list[str] = []
    lines: list[int] = []
    size = 0
    while (char := text.next_char()) not in ("", "]" if in_array else ""):
        if lines_seen := text.objects:
            if in_array and char != ",":
                raise text.problem(f"a comma or the array's end is expected after element {lines_seen - 1} (from 0)")
            if in_array:
                text.position += 1
                text.next_char()
        line, found = text.next_object()
        objects.append(found.replace("\n", " ").replace("\r", " "))
        lines.append(line)
        size += len(found)
        if size >= block_bytes:
            yield Block("\n".join(objects).encode(), lines, len(lines))
            objects, lines, size = [], [], 0
    if in_array:
        if text.next_char() != "]":
            raise text.problem("cut off: the array that the file begins with has no end")
        text.position += 1
        if text.next_char():
            raise text.problem("something follows the array's end")
    if objects:
        yield Block("\n".join(objects).encode(), lines, len(lines))


class _Text:
    """The text of a file from `position` on, of which more is read as it is needed."""

    def __init__(self, uri: str, head: bytes, stream: pa.NativeFile, block_bytes: int) -> None:
        self._uri, self._stream, self._block_bytes = uri, stream, block_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._ended = False
        self._held = ""
        self.position = 0
        self.objects = 0
        self._line = 1
        self._counted = 0
        self._take(head.removeprefix(codecs.BOM_UTF8))

    def next_char(self) -> str:
        """Return the next character that is not blank, at `position`; empty at the end of the file."""
        while True:
            self.position = _BLANK.match(self._held, self.position).end()  # type: ignore[union-attr]
            if self.position < len(self._held):
                return self._held[self.position]
            if not self._more(self._block_bytes):
                return ""

    def next_object(self) -> tuple[int, str]:
        """Return (its line, its text) of the object at `position`, which is moved behind it."""
        wanted = self._block_bytes
        while True:
            try:
                value, end = _DECODER.raw_decode(self._held, self.position)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._held) - _CUT_CHARS
                if cut and len(self._held) - self.position < _OBJECT_CHARS and self._more(wanted):
                    wanted *= 2  # so that a large object is not tried again after every block
                    continue
                where = "cut off within" if cut and self._ended else "not JSON in"
                at = self._line_here() + self._held.count("\n", self.position, error.pos)
                raise self.problem(f"{where} object {self.objects} (from 0): {error.msg} in line {at}") from error
            if not isinstance(value, dict):
                raise self.problem(f"holds {shorten(value)}, not an object {{...}}, as row {self.objects} (from 0)")
            line, text = self._line_here(), self._held[self.position : end]
            self.position = end
            self.objects += 1
            return line, text

    def problem(self, what: str) -> DataError:
        """Return an error at `position`."""
        return DataError(f"{self._uri}, line {self._line_here()}: {what}", next_step="write the file again, or repair it there")

    def _line_here(self) -> int:
        self._line += self._held.count("\n", self._counted, self.position)
        self._counted = self.position
        return self._line

    def _more(self, num_bytes: int) -> bool:
        self._forget()
        data = b"" if self._ended else self._stream.read(num_bytes)
        self._ended = not data
        if data:
            self._take(data)
        return bool(data)

    def _take(self, data: bytes) -> None:
        try:
            self._held += self._decoder.decode(data)
        except UnicodeDecodeError as error:
            line = self._line_here() + self._held.count("\n", self.position) + error.object.count(b"\n", 0, error.start)
            raise DataError(
                f"{self._uri}: line {line} is not UTF-8 (byte 0x{error.object[error.start]:02x})",
                next_step="if it is Latin-1, convert it: iconv -f latin1 -t utf8",
            ) from error

    def _forget(self) -> None:
        self._line_here()
        self._held = self._held[self.position :]
        self.position = self._counted = 0


_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)
"""Finds where an object ends; its numbers are read from its text later."""
