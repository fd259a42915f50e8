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
from penstock.ingest.files.opening import can_be_cut, open_stream
from penstock.ingest.formats.cells.cell_types import NULL_WORDS

__all__ = ["CsvOptions", "Dialect", "OnlyRows"]

Sign = Annotated[str, Field(min_length=1, max_length=1, pattern=r"^[\x00-\x7f]$")]
"""One ASCII character."""

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

    def open(self, file: SourceFile, only_rows: OnlyRows | None = None) -> Any:
        """Open as a binary stream of UTF-8. Reading raises UnicodeError where bytes are not of the encoding.

        Args:
            only_rows: counts the lines that are left out.
        """
        stream = open_stream(file.uri)
        if codecs.lookup(self.options.encoding).name != "utf-8":
            stream = pa.transcoding_input_stream(stream, self.options.encoding, "utf8")
        if self.options.comment is None and not self.options.skip_rows:
            return stream
        return pa.TransformInputStream(stream, only_rows or OnlyRows(self.options))

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


class OnlyRows:
    """Makes comments and the first lines of a file empty, block by block."""

    def __init__(self, options: CsvOptions) -> None:
        self._skip = options.skip_rows
        self._comment = (options.comment or "").encode()
        self._quote = options.quote.encode()
        self._quoted = False
        self._drops: bool | None = None
        """Whether the line that the last block has ended in is left out; None where a new one begins."""
        self.emptied = 0

    def __call__(self, block: pa.Buffer) -> bytes:
        """Return the next bytes of the file without what is not a row."""
        kept = []
        # Not splitlines: bytes such as a carriage return alone may be part of a value.
        *lines, rest = bytes(block).split(b"\n")
        for line, has_end in [*((line, True) for line in lines), (rest, False)]:
            if self._drops is None and (line or has_end):
                text = line.removeprefix(codecs.BOM_UTF8)
                is_comment = bool(self._comment) and not self._quoted and text.startswith(self._comment)
                self._drops = self._skip > 0 or is_comment
                self._skip = max(0, self._skip - 1)
                self.emptied += self._drops
            if not self._drops:
                self._quoted ^= bool(line.count(self._quote) % 2)
                kept.append(line)
            if has_end:
                kept.append(b"\n")
                self._drops = None
        return b"".join(kept)
