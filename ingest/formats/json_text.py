"""How does the text of a JSON file become blocks of one object a line?

A file of lines is read a block at a time. One array is held whole and becomes such lines: the text of an object stays as it is,
so numbers stay exact, but for its line breaks, which JSON has only between values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DataError
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import open_stream, read_blocks, read_problem
from penstock.ingest.formats.reader import looks_like
from penstock.ingest.formats.text_bytes import decode_block
from penstock.messages import shorten

__all__ = ["Block", "file_blocks", "has_long_integer", "is_array", "line_blocks", "read_head", "unique_keys"]

_BLOCK_BYTES = 4 << 20

_BLOCK_ROWS, _WIDE_BYTES = 256, 64 << 20
"""A block of long lines is larger, of some rows, but not without limit: each block has a cost for each column."""

_HEAD_BYTES = 64 << 10

_ARRAY_BYTES = 128 << 20
"""A larger array is refused: its text takes up to four times as much."""

_BLANK = re.compile(r"[ \t\r\n]*")

_BOM_AND_BLANK = b"\xef\xbb\xbf \t\r\n"

_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)
"""Finds where an object ends; its numbers are read from its text later."""

_LONG_INTEGER = r"(^|[^0-9.])[0-9]{%d,}(\.0*)?([^0-9.eE]|$)"


class Block(NamedTuple):
    """Some objects, one a line."""

    text: bytes
    lines: range | list[int]
    """The line of the file, from 1, that each line of `text` begins at; blank lines of it hold no object."""
    rows: int
    at: int | None = None
    """The byte of the file that it begins at, in a file of lines."""

    def numbered_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the file's line and the text of every object."""
        return ((line, text) for line, text in zip(self.lines, self.text.split(b"\n"), strict=False) if text.strip())


def file_blocks(file: SourceFile) -> Iterator[Block]:
    """Yield the objects of a file, however it is laid out.

    Raises:
        DataError: it is not JSON, a row is not an object, or the file is cut off; names the line.
    """
    try:
        with open_stream(file.uri) as stream:
            head = read_head(stream)
            if not head.lstrip(_BOM_AND_BLANK).startswith((b"{", b"[")) and (what := looks_like(file)) not in ("", "text"):
                raise DataError(f"{file.uri}: this is {what}, not JSON")
            yield from _array_blocks(file, head, stream) if is_array(head) else line_blocks(file, stream, head)
    except (OSError, pa.ArrowException) as error:
        raise read_problem(file.uri, error) from error


def read_head(stream: pa.NativeFile) -> bytes:
    """Return the beginning of the file: its first line that is not blank, or a block."""
    head = b""
    while len(head) < _BLOCK_BYTES and b"\n" not in head.lstrip(_BOM_AND_BLANK):
        more = stream.read(_HEAD_BYTES)
        if not more:
            break
        head += more
    return head


def is_array(head: bytes) -> bool:
    """Whether a file that begins so is one array."""
    return head.lstrip(_BOM_AND_BLANK).startswith(b"[")


def line_blocks(file: SourceFile, stream: pa.NativeFile, head: bytes = b"", line: int = 1, offset: int = 0) -> Iterator[Block]:
    """Yield the rest of a file of lines, whose next line is `line` and begins at byte `offset`.

    Raises:
        DataError: a line is not UTF-8, or too long.
    """
    for block in read_blocks(file.uri, stream, _block_bytes(len(head.lstrip(_BOM_AND_BLANK).partition(b"\n")[0])), head):
        _, problem = decode_block(block, line, offset)
        if problem:
            raise DataError(f"{file.uri}: {problem}")
        num_rows, num_ends = sum(1 for text in block.split(b"\n") if text.strip()), block.count(b"\n")
        if num_rows:
            yield Block(block.removeprefix(b"\xef\xbb\xbf"), range(line, line + num_ends + 1), num_rows, offset)
        line += num_ends
        offset += len(block)


def _block_bytes(row_bytes: int) -> int:
    return max(_BLOCK_BYTES, min(_BLOCK_ROWS * row_bytes, _WIDE_BYTES))


def _array_blocks(file: SourceFile, head: bytes, stream: pa.NativeFile) -> Iterator[Block]:
    data = head
    while len(data) <= _ARRAY_BYTES and (more := stream.read(_ARRAY_BYTES)):
        data += more
    if len(data) > _ARRAY_BYTES:
        raise DataError(
            f"{file.uri}: is one array of more than {_ARRAY_BYTES >> 20} MB",
            next_step="write an object a line: jq -c '.[]' FILE > NEW.jsonl",
        )
    text, problem = decode_block(data, 1, 0)
    if problem:
        raise DataError(f"{file.uri}: {problem}")
    del data
    objects: list[str] = []
    lines: list[int] = []
    size = 0
    for line, found in _objects(file, text.removeprefix("\ufeff")):
        objects.append(found)
        lines.append(line)
        size += len(found)
        if size >= _block_bytes(len(found)):
            yield Block("\n".join(objects).encode(), lines, len(lines))
            objects, lines, size = [], [], 0
    if objects:
        yield Block("\n".join(objects).encode(), lines, len(lines))


def _objects(file: SourceFile, text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text, on one line, of the objects of an array."""
    at = _after_blank(text, text.index("[") + 1)
    line, counted, number = 1, 0, 0

    def problem(what: str) -> DataError:
        where = f"{file.uri}, line {text.count(chr(10), 0, at) + 1}"
        return DataError(f"{where}: {what}", next_step="write the file again, or repair it there")

    while text[at : at + 1] != "]":
        try:
            value, end = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise problem(f"not JSON, or cut off, in object {number} (from 0): {error.msg} in line {error.lineno}") from error
        if not isinstance(value, dict):
            raise problem(f"holds {shorten(value)}, not an object {{...}}, as row {number} (from 0)")
        line, counted = line + text.count("\n", counted, at), at
        yield line, text[at:end].replace("\n", " ").replace("\r", " ")
        at = _after_blank(text, end)
        if text[at : at + 1] == ",":
            at = _after_blank(text, at + 1)
        elif text[at : at + 1] != "]":
            raise problem(f"a comma or the array's end is expected after element {number} (from 0)")
        number += 1
    at = _after_blank(text, at + 1)
    if at < len(text):
        raise problem("something follows the array's end")


def _after_blank(text: str, at: int) -> int:
    return _BLANK.match(text, at).end()  # type: ignore[union-attr]


def has_long_integer(text: bytes, width: int = 64) -> bool:
    """Whether there are 16 digits or more (8, 4) of no fraction but 0: all integers that a float may round, and some others."""
    return bool(pc.match_substring_regex(pa.scalar(text, pa.binary()), _LONG_INTEGER % (width // 4)).as_py())


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its keys and values, for the hook of the json module. Raises ValueError if a key is there twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return value
