"""Where is a text file not UTF-8, and is one UTF-8 although another encoding is declared?"""

from __future__ import annotations

import pyarrow as pa

from penstock.ingest.files.opening import read_characters

__all__ = ["bad_utf8", "decode_block", "misread"]

_BLOCK_BYTES = 4 << 20


def bad_utf8(stream: pa.NativeFile) -> str:
    """Describe line, byte and likely encoding of the first bytes that are not UTF-8; empty if all are."""
    line, offset = 1, 0
    for block in read_characters(stream, _BLOCK_BYTES):
        _, problem = decode_block(block, line, offset)
        if problem:
            return problem
        line += block.count(b"\n")
        offset += len(block)
    return ""


def misread(stream: pa.NativeFile, encoding: str) -> tuple[str, str] | None:
    """Return the first letter beyond ASCII of a file that is UTF-8 after all, and how it reads in `encoding`; else None."""
    letter = ""
    for block in read_characters(stream, _BLOCK_BYTES):
        text, problem = ("", "") if block.isascii() else decode_block(block, 1, 0)
        if problem:
            return None
        letter = letter or next((each for each in text if not each.isascii()), "")
    return (letter, letter.encode().decode(encoding, "replace")) if letter else None


def decode_block(block: bytes, first_line: int, offset: int) -> tuple[str, str]:
    """Return (text, problem). `first_line` counts from 1; `offset` is the block's first byte in the file."""
    try:
        return block.decode("utf-8"), ""
    except UnicodeDecodeError as error:
        line = first_line + block.count(b"\n", 0, error.start)
        start = block.rfind(b"\n", 0, error.start) + 1
        # Every byte string is Latin-1: it shows the user the place, and is right more often than any other guess.
        shown = block[max(start, error.start - 20) : error.start + 20].split(b"\n")[0].decode("latin-1")
        return "", (
            f"line {line} is not UTF-8 (byte 0x{block[error.start]:02x} at offset {offset + error.start}, near {shown!r}); "
            "if it is Latin-1, convert it: iconv -f latin1 -t utf8"
        )
