"""How is a CSV file written: its delimiter, quotes, encoding, decimal mark and header?

The pipeline file declares it; nothing is guessed. Whatever the encoding, `Dialect.open` gives UTF-8.
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
from penstock.ingest.formats.cell_types import NULL_WORDS

__all__ = ["CsvOptions", "Dialect"]

Sign = Annotated[str, Field(min_length=1, max_length=1, pattern=r"^[\x00-\x7f]$")]
"""One ASCII character."""

_MAX_FIELD_CHARS = (1 << 31) - 1


class CsvOptions(Section):
    """How the files are written. Nothing of it is guessed; an error describes what a file looks like."""

    delimiter: Sign | None = None
    """What separates the fields. Without it a comma, and a tab in files named .tsv or .tab."""
    quote: Sign | Literal[""] = '"'
    """What encloses a field that holds delimiters or lines; twice within such a field, it means itself. Empty: nothing does."""
    decimal: Literal[".", ","] = "."
    """The decimal mark of numbers. With a comma, `1,5` is a number and `1.5` is text."""
    encoding: str = "utf-8"
    """Of the text, by Python's name: `latin-1`, `cp1252`, `utf-16`."""
    header: list[str] | None = Field(default=None, min_length=1)
    """The names of all columns, for files that have no header line."""
    nulls: list[str] | None = None
    """Words for a missing value in any column, also of text; blanks around them do not count. Without it those of pandas
    (`NA`, `null`, `NaN`, ...) count as missing in columns other than text. An empty field is always missing."""
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
        return codecs.lookup(self.options.encoding).name == "utf-8" and can_be_cut(file.uri)

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
        return stream

    def records(self, file: SourceFile) -> Iterator[tuple[int, list[str], str]]:
        """Yield (first line of the record from 1, its fields, its problem) of every record, the header included."""
        # The limit is one for the process and 128 KiB by default, less than one long text.
        csv.field_size_limit(_MAX_FIELD_CHARS)
        with self.open(file) as stream, io.TextIOWrapper(stream, "utf-8-sig", errors="replace", newline="") as text:
            records = self.parsed(file, text, strict=True)
            while True:
                start = self.options.skip_rows + records.line_num + 1
                try:
                    yield start, next(records), ""
                except StopIteration:
                    return
                except csv.Error:
                    # What is on one line is harmless: text after a closing quote, which the fast parser takes as it is.
                    last = self.options.skip_rows + records.line_num
                    if last > start:
                        yield (
                            start,
                            [],
                            f"a quote in the record of line {start} is never closed, or wrongly: it reaches line {last}",
                        )

    def parsed(self, file: SourceFile, text: io.TextIOBase, *, strict: bool = False) -> Any:
        """Return Python's parser of the lines after `skip_rows`."""
        for _ in range(self.options.skip_rows):
            text.readline()
        if not self.options.quote:
            return csv.reader(text, delimiter=self.delimiter(file), quoting=csv.QUOTE_NONE, strict=strict)
        return csv.reader(text, delimiter=self.delimiter(file), quotechar=self.options.quote, strict=strict)

    def without_nulls(self, text: pa.Array) -> pa.Array:
        """Replace the words of `nulls` by null, in a column of any type."""
        absent = pc.is_in(pc.utf8_trim_whitespace(text), self.null_words)
        return pc.if_else(absent, None, text) if pc.any(absent).as_py() else text

    def pointed(self, text: pa.Array) -> pa.Array:
        """Swap decimal commas and points, so that numbers have a point. Twice gives the original."""
        if self.options.decimal == ".":
            return text
        held = pc.replace_substring(text, ",", "\0")
        return pc.replace_substring(pc.replace_substring(held, ".", ","), "\0", ".")
