"""How is a CSV file written: its delimiter, quotes, encoding, decimal mark, header, and the lines that are not rows?

The pipeline file declares it; nothing is guessed. Whatever the encoding, `Dialect.open` gives UTF-8, with lines that are not
rows made empty, so that line numbers stay those of the file.
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, NonNegativeInt, field_validator

from penstock.config import Section
from penstock.ingest.files.listing import SourceFile, extension_of
from penstock.ingest.files.opening import can_be_cut, open_stream, read_blocks
from penstock.ingest.formats.cells.cell_types import NULL_WORDS

__all__ = ["CsvOptions", "Dialect"]

Sign = Annotated[str, Field(min_length=1, max_length=1, pattern=r"^[\x00-\x7f]$")]
"""One ASCII character."""

_BLOCK_BYTES = 4 << 20

_MAX_FIELD_CHARS = (1 << 31) - 1


class CsvOptions(Section):
    """How the files are written. Nothing of it is guessed; an error describes what a file looks like."""

    delimiter: Sign | None = None
    """What separates the fields. Without it a comma, and a tab in files named .tsv or .tab."""
    quote: Sign = '"'
    """What encloses a field that holds delimiters or lines; twice within such a field, it means itself."""
    escape: Sign | None = None
    """What makes the character after it plain."""
    decimal: Literal[".", ","] = "."
    """The decimal mark of numbers. With a comma, `1,5` is a number and `1.5` is text."""
    encoding: str = "utf-8"
    """Of the text, by Python's name: `latin-1`, `cp1252`, `utf-16`."""
    header: list[str] | None = Field(default=None, min_length=1)
    """The names of all columns, for files that have no header line."""
    comment: Sign | None = None
    """A line that begins with it, outside quotes, is not a row."""
    nulls: list[str] | None = None
    """Words for a missing value in any column, also of text. Without it those of pandas (`NA`, `null`, `NaN`, ...) count as
    missing in columns other than text. An empty field is always missing."""
    skip_rows: NonNegativeInt = 0
    """Lines before the header (or the first row) to leave out."""

    @field_validator("encoding")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            codecs.lookup(name)
        except LookupError as error:
            raise ValueError(f"{name!r} is not an encoding that Python knows") from error
        return name


class Dialect:
    """Apply the options to files."""

    def __init__(self, options: CsvOptions) -> None:
        self.options = options
        self.null_words = NULL_WORDS if options.nulls is None else pa.array(["", *options.nulls], pa.string())

    def delimiter(self, file: SourceFile) -> str:
        """Return the sign between the fields of `file`."""
        return self.options.delimiter or ("\t" if extension_of(file.name) in (".tsv", ".tab") else ",")

    def can_be_cut(self, file: SourceFile) -> bool:
        """Whether reading may begin at any record: its begin is found from the bytes around it, which are the text's."""
        of = self.options
        plain = of.escape is None and of.comment is None and not of.skip_rows
        return plain and codecs.lookup(of.encoding).name == "utf-8" and can_be_cut(file.uri)

    @property
    def has_one_byte_letters(self) -> bool:
        """Whether any bytes are text in the encoding, so that UTF-8 is read as other letters and not refused."""
        name = codecs.lookup(self.options.encoding).name
        return not name.startswith("utf") and len(bytes(range(128, 256)).decode(name, "replace")) == 128

    def open(self, file: SourceFile) -> Any:
        """Open as a binary stream of UTF-8. Reading raises UnicodeError where bytes are not of the encoding."""
        stream = open_stream(file.uri)
        if codecs.lookup(self.options.encoding).name != "utf-8":
            stream = pa.transcoding_input_stream(stream, self.options.encoding, "utf8")
        if self.options.comment is None and not self.options.skip_rows:
            return stream
        return io.BufferedReader(_OnlyRows(file.uri, stream, self.options), _BLOCK_BYTES)

    def records(self, file: SourceFile) -> Iterator[tuple[int, list[str], str]]:
        """Yield (first line of the record from 1, its fields, its problem) of every record, the header included."""
        # The limit is one for the process and 128 KiB by default, less than one long text.
        csv.field_size_limit(_MAX_FIELD_CHARS)
        with self.open(file) as stream, io.TextIOWrapper(stream, "utf-8-sig", errors="replace", newline="") as text:
            records = self.parsed(file, text, strict=True)
            while True:
                start = records.line_num + 1
                try:
                    yield start, next(records), ""
                except StopIteration:
                    return
                except csv.Error:
                    # What is on one line is harmless: text after a closing quote, which the fast parser takes as it is.
                    if records.line_num > start:
                        last = records.line_num
                        yield (
                            start,
                            [],
                            f"a quote in the record of line {start} is never closed, or wrongly: it reaches line {last}",
                        )

    def parsed(self, file: SourceFile, text: io.TextIOBase, *, strict: bool = False) -> Any:
        """Return Python's parser of the text."""
        of = self.options
        return csv.reader(text, delimiter=self.delimiter(file), quotechar=of.quote, escapechar=of.escape, strict=strict)

    def without_nulls(self, text: pa.Array) -> pa.Array:
        """Replace the words of `nulls` by null, in a column of any type."""
        return text if self.options.nulls is None else pc.if_else(pc.is_in(text, self.null_words), None, text)

    def pointed(self, text: pa.Array) -> pa.Array:
        """Swap decimal commas and points, so that numbers have a point. Twice gives the original."""
        if self.options.decimal == ".":
            return text
        held = pc.replace_substring(text, ",", "\0")
        return pc.replace_substring(pc.replace_substring(held, ".", ","), "\0", ".")


class _OnlyRows(io.RawIOBase):
    """A stream whose comments and first lines are made empty."""

    def __init__(self, uri: str, stream: pa.NativeFile, options: CsvOptions) -> None:
        self._stream = stream
        self._blocks = read_blocks(uri, stream, _BLOCK_BYTES)
        self._skip = options.skip_rows
        self._comment = (options.comment or "").encode()
        self._quote = options.quote.encode()
        self._quoted = False
        self._rest = memoryview(b"")
        self.emptied = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes."""
        if not len(self._rest):
            self._rest = memoryview(self._rows(next(self._blocks, b"")))
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size

    def close(self) -> None:
        """Close the stream below."""
        self._stream.close()
        super().close()

    def _rows(self, block: bytes) -> bytes:
        # Not splitlines: bytes such as a carriage return alone may be part of a value.
        lines = [line + b"\n" for line in block.split(b"\n")]
        lines[-1] = lines[-1][:-1]
        if not lines[-1]:
            lines.pop()
        kept = []
        for line in lines:
            comment = bool(self._comment) and not self._quoted and line.removeprefix(codecs.BOM_UTF8).startswith(self._comment)
            if self._skip or comment:
                self._skip = max(0, self._skip - 1)
                self.emptied += 1
                kept.append(b"\n")
                continue
            self._quoted ^= bool(line.count(self._quote) % 2)
            kept.append(line)
        return b"".join(kept)
