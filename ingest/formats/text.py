"""How do text files become rows: a line, a file or a chunk of characters each?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pyarrow as pa
from pydantic import PositiveInt

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import can_be_cut, open_span, open_stream, read_blocks, read_characters, read_problem
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.reader import Cuts, FileFacts, Reader, last_cut, looks_like, rows_between
from penstock.ingest.formats.text_bytes import decode_block
from penstock.ingest.spec import DataSpec

__all__ = ["TextFormat", "TextOptions", "TextReader"]

_BLOCK_BYTES = 4 << 20


class TextOptions(Section):
    """How a text file becomes rows: one column, `text`."""

    rows: Literal["line", "file", "chunk"] = "line"
    """One row per line, per file, or per fixed-length chunk of characters (the last, shorter one of a file is left out)."""
    chunk_chars: PositiveInt = 128
    """Length of a chunk in characters; only for `rows: chunk`."""


class TextFormat(Format):
    """UTF-8 text in one column, `text`; may be compressed."""

    extensions = (".txt", ".text")
    Options = TextOptions
    folder_columns = False

    def reader(self, data: DataSpec, options: TextOptions) -> TextReader:
        """Read lines, files or chunks."""
        return TextReader(options)


class TextReader(Reader):
    """UTF-8 text in one column `text`. Lines end with LF or CR LF; empty lines are rows too."""

    def __init__(self, options: TextOptions) -> None:
        self._options = options
        self.one_row_per_file = options.rows == "file"

    def inspect(self, file: SourceFile) -> FileFacts:
        """Decode the whole file and count its rows."""
        if self.one_row_per_file:
            return FileFacts({"text": pa.string()}, 1, row_bytes=sum(len(text) for _, text in self._texts(file)))
        if self._options.rows == "line":
            return self._lines_of(file)
        rows = sum(len(texts) for texts in self._rows(file))
        if rows == 0:
            raise DataError(
                f"{file.uri}: shorter than one chunk of {self._options.chunk_chars} characters",
                next_step="lower data.text.chunk_chars, or leave the file out",
            )
        return FileFacts({"text": pa.string()}, rows)

    def _lines_of(self, file: SourceFile) -> FileFacts:
        rows, cuts = 0, Cuts()
        for offset, text in self._texts(file):
            if can_be_cut(file.uri):
                cuts.add(rows, offset, rows + 1)
            rows += text.count("\n") + (text[-1:] not in ("", "\n"))
        return FileFacts({"text": pa.string()}, rows, cuts=cuts.found())

    def piece(self, file: SourceFile, schema: pa.Schema, batch_rows: int, first_row: int, end: int) -> Iterator[pa.Table]:
        """Begin at the last cut before the row."""
        cut = last_cut(file, first_row)
        with open_span(file.uri, cut.at, file.size_bytes) as stream:
            tables = _tables(_lines(_blocks(file, stream, cut.line, cut.at)), schema)
            yield from rows_between(tables, cut.row, first_row, end)

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows, about 4 MiB of text at a time."""
        yield from _tables(self._rows(file), schema)

    def _rows(self, file: SourceFile) -> Iterator[list[str]]:
        if self._options.rows == "line":
            yield from _lines(self._texts(file))
        elif self._options.rows == "file":
            yield ["".join(text for _, text in self._texts(file))]
        else:
            yield from self._chunks(file)

    def _chunks(self, file: SourceFile) -> Iterator[list[str]]:
        size, rest = self._options.chunk_chars, ""
        for _, text in self._texts(file):
            text = rest + text
            whole = len(text) - len(text) % size
            rest = text[whole:]
            if whole:
                yield [text[start : start + size] for start in range(0, whole, size)]

    def _texts(self, file: SourceFile) -> Iterator[tuple[int, str]]:
        """Yield blocks of the text, each with the byte of the file that it begins at."""
        try:
            with open_stream(file.uri) as stream:
                yield from _blocks(file, stream, 1, 0, in_lines=self._options.rows == "line")
        except (OSError, pa.ArrowException) as error:
            raise read_problem(file.uri, error) from error


def _tables(rows: Iterator[list[str]], schema: pa.Schema) -> Iterator[pa.Table]:
    kinds = [field.type for field in schema]
    for texts in rows:
        yield pa.table([pa.array(texts, kind) for kind in kinds], schema=schema)


def _lines(texts: Iterator[tuple[int, str]]) -> Iterator[list[str]]:
    for _, text in texts:
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()
        yield [line.removesuffix("\r") for line in lines]


def _blocks(
    file: SourceFile, stream: pa.NativeFile, line: int, offset: int, *, in_lines: bool = True
) -> Iterator[tuple[int, str]]:
    """Yield the rest of a file, whose next line is `line` and begins at byte `offset`.

    Args:
        in_lines: whether a block ends with a line.
    """
    for block in read_blocks(file.uri, stream, _BLOCK_BYTES) if in_lines else read_characters(stream, _BLOCK_BYTES):
        if offset == 0 and b"\0" in block[:512]:
            raise DataError(f"{file.uri}: this is {looks_like(file)}, not UTF-8 text")
        text, problem = decode_block(block, line, offset)
        if problem:
            what = looks_like(file) if offset == 0 else ""
            raise DataError(f"{file.uri}: this is {what}, not UTF-8 text" if what else f"{file.uri}: {problem}")
        yield offset, text.removeprefix("\ufeff") if offset == 0 else text
        line += block.count(b"\n")
        offset += len(block)
