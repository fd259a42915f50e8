"""How are CSV files read, so that a stray value or a broken quote is named by its line?

Every cell is read as text and typed here: pyarrow's own inference looks at the first block only, turns a column with one stray
word into text, `007` into 7 and Latin-1 text into bytes, and swallows the lines after an open quote, all without a word.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv

from penstock.errors import DataError
from penstock.ingest.columns.casts import cast_array, first_bad_row
from penstock.ingest.files.listing import SourceFile, capped, extension_of
from penstock.ingest.files.opening import open_stream, read_problem
from penstock.ingest.formats.cell_types import NULL_WORDS, CellTypes, without_null_words
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.reader import FileFacts, MostlyNumbers, Reader, looks_like
from penstock.ingest.formats.text_bytes import bad_utf8
from penstock.ingest.spec import DataSpec
from penstock.messages import shorten

__all__ = ["CsvFormat", "CsvReader"]


_BLOCK_BYTES = 4 << 20

_MAX_FIELD_CHARS = (1 << 31) - 1


class CsvFormat(Format):
    """A header line, then commas, or tabs in .tsv and .tab; may be compressed (.gz, .bz2, .zst, .lz4)."""

    extensions = (".csv", ".tsv", ".tab")
    null_words = NULL_WORDS

    def reader(self, data: DataSpec, options: None) -> CsvReader:
        """Read text, typed here."""
        return CsvReader(data)


class CsvReader(Reader):
    """CSV with a header line; `.tsv` and `.tab` files are separated by tabs."""

    def __init__(self, data: DataSpec) -> None:
        self._types = data.types
        self._columns = data.read_columns

    def inspect(self, file: SourceFile) -> FileFacts:
        """Parse the whole file, infer a type from all values of each column, and check quotes across lines."""
        header = self._header(file)
        wanted = [name for name in header if self._columns is None or name in self._columns]
        cells = {name: CellTypes() for name in wanted}
        rows = 0
        lines = _LineCounter(open_stream(file.uri))
        for batch in self._text_batches(file, lines, header, wanted):
            for name in wanted:
                if name not in self._types:
                    cells[name].see(batch.column(name), rows)
            rows += batch.num_rows
        # Several lines in one row are legal in quotes; far more often a quote was left open and has swallowed them.
        if lines.count != rows + 1 and (problems := self._broken_records(file, len(header))):
            raise _broken(file, problems)
        columns = {name: cells[name].kind for name in wanted}
        evidence = {
            name: MostlyNumbers(seen.numbers, seen.values, self._place(file, seen.first_text_row, seen.first_text))
            for name, seen in cells.items()
            if seen.kind == pa.string() and seen.is_mostly_numbers
        }
        return FileFacts(columns, rows, evidence)

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows, about 4 MiB of text at a time."""
        header = self._header(file)
        rows = 0
        for batch in self._text_batches(file, open_stream(file.uri), header, schema.names):
            columns = []
            for field in schema:
                text = batch.column(field.name)
                try:
                    columns.append(_typed(text, field.type))
                except pa.ArrowException as error:
                    bad = first_bad_row(without_null_words(text), field.type)
                    raise DataError(
                        f"{file.uri}, {self._place(file, rows + bad, text[bad].as_py())} in column {field.name!r}, "
                        f"which does not read as {field.type}",
                        next_step=f"repair the line, or set data.types: {{{field.name}: string}}",
                    ) from error
            yield pa.table(columns, schema=schema)
            rows += batch.num_rows

    def misfit(self, file: SourceFile, column: str, kind: pa.DataType) -> str:
        """Say where the first value is that does not read as `kind`."""
        rows = 0
        for batch in self._text_batches(file, open_stream(file.uri), self._header(file), [column]):
            values = without_null_words(batch.column(column))
            try:
                cast_array(values, kind)
            except pa.ArrowException:
                bad = first_bad_row(values, kind)
                return self._place(file, rows + bad, values[bad].as_py())
            rows += batch.num_rows
        return ""

    def _header(self, file: SourceFile) -> list[str]:
        try:
            with open_stream(file.uri) as stream:
                head = stream.read(1 << 20)
        except (OSError, pa.ArrowException) as error:
            raise read_problem(file.uri, error) from error
        if what := looks_like(file) if b"\0" in head[:512] or head[:4] in (b"PAR1", b"<!DO", b"<htm") else "":
            raise DataError(f"{file.uri}: this is {what}, not CSV")
        text = head.decode("utf-8-sig", errors="replace")
        header = next((row for row in csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(file)) if row), [])
        if len(header) == 1 and (other := next((sign for sign in ";\t|" if sign in header[0]), "")):
            raise DataError(
                f"{file.uri}: its columns are separated by {other!r}, not by a comma",
                next_step="write it again with commas (tabs are read from files named .tsv)",
            )
        repeated = sorted({name for name in header if header.count(name) > 1})
        if repeated:
            raise DataError(f"{file.uri}: column {repeated[0]!r} is in the header twice")
        if header and all(_is_number(name) for name in header):
            raise DataError(
                f"{file.uri}: the first line holds values ({shorten(','.join(header))}), not the names of the columns",
                next_step="put a header line before it",
            )
        return header

    def _text_batches(
        self, file: SourceFile, stream: pa.NativeFile | _LineCounter, header: list[str], wanted: list[str]
    ) -> Iterator[pa.RecordBatch]:
        """All cells as text. An empty cell is null, an empty pair of quotes is empty text."""
        try:
            batches = arrow_csv.open_csv(
                stream,
                read_options=arrow_csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False),
                parse_options=arrow_csv.ParseOptions(delimiter=_delimiter(file), newlines_in_values=True),
                convert_options=arrow_csv.ConvertOptions(
                    column_types=dict.fromkeys(header, pa.string()),
                    include_columns=wanted,
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
            yield from batches
        except pa.ArrowInvalid as error:
            problems = self._bad_bytes(file) or self._broken_records(file, len(header)) or _long_records(file)
            problems = problems or [" ".join(str(error).split())]
            raise _broken(file, problems) from error
        except OSError as error:
            raise read_problem(file.uri, error) from error
        finally:
            stream.close()

    def _bad_bytes(self, file: SourceFile) -> list[str]:
        with open_stream(file.uri) as stream:
            place = bad_utf8(stream)
        return [place] if place else []

    def _broken_records(self, file: SourceFile, num_columns: int) -> list[str]:
        """Go through the file with Python's strict parser, 10 times slower, to learn the lines."""
        problems = []
        for start, row, problem in _strict_records(file):
            if problem:
                problems.append(problem)
            elif row and len(row) != num_columns:
                problems.append(f"line {start} has {len(row)} instead of {num_columns} fields: {shorten(','.join(row))}")
        return problems

    def lines(self, file: SourceFile, rows: Collection[int]) -> dict[int, int]:
        """See `Reader.lines`."""
        seen, last = -2, max(rows, default=-1)  # the header is a record too
        found: dict[int, int] = {}
        for start, fields, _ in _strict_records(file):
            seen += bool(fields)
            if fields and seen in rows:
                found[seen] = start
            if seen >= last:
                break
        return found

    def _place(self, file: SourceFile, row: int, value: object) -> str:
        """`line 12 holds 'abc'`, for a row counted from 0."""
        start = self.lines(file, (row,)).get(row)
        place = f"row {row} (from 0)" if start is None else f"line {start} (row {row} from 0)"
        return f"{place} holds {shorten(value)}"


def _broken(file: SourceFile, problems: list[str]) -> DataError:
    more = f" (and {len(problems) - 1} more such lines)" if len(problems) > 1 else ""
    return DataError(f"{file.uri}: {problems[0]}{more}", problems=capped(problems[1:]), next_step="repair the lines")


class _LineCounter:
    """A stream that counts the lines read through it."""

    def __init__(self, stream: pa.NativeFile) -> None:
        self._stream = stream
        self._ends = 0
        self._last = b"\n"
        self.closed = False

    @property
    def count(self) -> int:
        """Lines so far, a last one without its end included."""
        return self._ends + (self._last != b"\n")

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes."""
        block = bytes(self._stream.read(size if size >= 0 else None))
        self._ends += block.count(b"\n")
        self._last = block[-1:] or self._last
        return block

    def close(self) -> None:
        """Close the stream below."""
        self._stream.close()
        self.closed = True


def _strict_records(file: SourceFile) -> Iterator[tuple[int, list[str], str]]:
    """(first line of the record from 1, its fields, what is wrong with it) for every record, the header included."""
    # The limit is one for the process and 128 KiB by default, less than one long text.
    csv.field_size_limit(_MAX_FIELD_CHARS)
    with open_stream(file.uri) as stream, io.TextIOWrapper(stream, "utf-8-sig", errors="replace", newline="") as text:
        records = csv.reader(text, delimiter=_delimiter(file), strict=True)
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


def _long_records(file: SourceFile) -> list[str]:
    limit = f"{_BLOCK_BYTES >> 20} MiB, the most that a CSV row may have"
    long = (start for start, row, _ in _strict_records(file) if sum(map(len, row)) > _BLOCK_BYTES)
    return [f"the row of line {start} is longer than {limit}; keep such texts in Parquet" for start in long]


def _typed(text: pa.Array, kind: pa.DataType) -> pa.Array:
    if kind in (pa.string(), pa.large_string()):
        return pc.cast(text, kind)
    return cast_array(without_null_words(text), kind)


def _delimiter(file: SourceFile) -> str:
    return "\t" if extension_of(file.name) in (".tsv", ".tab") else ","


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
