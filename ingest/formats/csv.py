"""How are CSV files read, so that a stray value or a broken quote is named by its line?

Every cell is read as text and typed here: pyarrow's own inference looks at the first block only, turns a column with one stray
word into text, `007` into 7 and Latin-1 text into bytes, and swallows the lines after an open quote, all without a word.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Collection, Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv

from penstock.errors import DataError
from penstock.ingest.columns.casts import cast_array, first_bad_row
from penstock.ingest.columns.type_text import parse_type
from penstock.ingest.files.listing import Cut, SourceFile
from penstock.ingest.files.opening import open_head, open_span, open_stream, read_problem
from penstock.ingest.formats.cell_types import NULL_WORDS, CellTypes, missing_advice, without_words
from penstock.ingest.formats.csv_dialect import CsvOptions, Dialect
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.reader import Cuts, FileFacts, Keep, MostlyNumbers, Reader, last_cut, looks_like, rows_between
from penstock.ingest.formats.text_bytes import bad_utf8, misread
from penstock.ingest.spec import DataSpec
from penstock.messages import capped, in_yaml, shorten

__all__ = ["CsvFormat", "CsvReader"]

_BLOCK_BYTES = 4 << 20

_CONVERT = "pandas.read_csv(FILE, comment='#', escapechar='\\\\').to_csv(NEW, index=False)"


class CsvFormat(Format):
    """A header line, then commas, or tabs in .tsv and .tab, or as in `data.csv`; .gz, .bz2, .zst and .lz4 are unpacked."""

    extensions = (".csv", ".tsv", ".tab")
    Options = CsvOptions
    null_words = NULL_WORDS

    def reader(self, data: DataSpec, options: CsvOptions) -> CsvReader:
        """Read text, typed here."""
        return CsvReader(data, options)


class CsvReader(Reader):
    """CSV in the dialect of its options: by default with a header line and commas, `.tsv` and `.tab` files with tabs."""

    hands_on_rows = True

    def __init__(self, data: DataSpec, options: CsvOptions) -> None:
        self._form = Dialect(options)
        self._before_rows = options.skip_rows + (not options.header)
        self._types = {name: parse_type(text) for name, text in data.types.items()}
        self._columns = None if data.read_columns is None else frozenset(data.read_columns)

    def inspect(self, file: SourceFile, keep: Keep | None = None) -> FileFacts:
        """Parse the whole file, infer a type from all values of each column, and check quotes across lines."""
        header = self._header(file)
        cells, rows, lines = self._seen(file, header, self._form.open(file), keep)
        line_is_row = lines.count == rows + self._before_rows
        # Several lines in one row are legal in quotes; far more often a quote was left open and has swallowed them.
        if not line_is_row and (problems := self._broken_records(file, header)):
            raise _broken(file, problems, header)
        self._refuse_utf8(file)
        is_cut = line_is_row and lines.are_plain and self._form.can_be_cut(file)
        return self._facts(file, cells, rows)._replace(cuts=lines.cuts.found() if is_cut else ())

    def inspect_head(self, file: SourceFile, head_bytes: int) -> FileFacts | None:
        """See `Reader.inspect_head`: the lines that end there."""
        if not self._form.can_be_cut(file):
            return None
        cells, rows, _ = self._seen(file, self._header(file), open_head(file.uri, head_bytes), None)
        return self._facts(file, cells, rows)

    def _seen(
        self, file: SourceFile, header: list[str], stream: pa.NativeFile, keep: Keep | None
    ) -> tuple[dict[str, CellTypes], int, _LineCounter]:
        """Read the rows of a stream that begins with the file, and count rows and lines."""
        wanted = [name for name in header if self._columns is None or name in self._columns]
        cells = {name: CellTypes(self._form.null_words) for name in wanted}
        rows = 0
        lines = _LineCounter(stream, self._before_rows)
        for batch in self._text_batches(file, lines, header, wanted):
            self._see(cells, batch, rows, keep)
            rows += batch.num_rows
        return cells, rows, lines

    def _see(self, cells: dict[str, CellTypes], batch: pa.RecordBatch, first_row: int, keep: Keep | None) -> None:
        read: dict[str, pa.Array | None] = {}
        for name, seen in cells.items():
            if name not in self._types:
                read[name] = seen.see(self._form.pointed(batch.column(name)), first_row)
        if keep is None:
            return
        columns = []
        try:
            for name, seen in cells.items():
                found, kind = read.get(name), self._types.get(name, seen.kind)
                columns.append(self._typed(batch.column(name), kind) if found is None else found)
        except pa.ArrowException:  # `tables` names the place
            keep(None)
        else:
            keep(pa.RecordBatch.from_arrays(columns, names=list(cells)))

    def _facts(self, file: SourceFile, cells: dict[str, CellTypes], rows: int) -> FileFacts:
        columns = {name: seen.kind for name, seen in cells.items()}
        evidence = {
            name: MostlyNumbers(seen.numbers, seen.values, self._place(file, seen.first_text_row, self._shown(seen.first_text)))
            for name, seen in cells.items()
            if seen.kind == pa.string() and seen.is_mostly_numbers
        }
        return FileFacts(columns, rows, evidence)

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows, about 4 MiB of text at a time."""
        header = self._header(file)
        yield from self._tables(file, self._form.open(file), header, schema, Cut(0, 0, 1))

    def piece(self, file: SourceFile, schema: pa.Schema, batch_rows: int, first_row: int, end: int) -> Iterator[pa.Table]:
        """Begin at the last cut before the row."""
        cut, header = last_cut(file, first_row), self._header(file)
        stream = open_span(file.uri, cut.at, file.size_bytes)
        yield from rows_between(self._tables(file, stream, header, schema, cut), cut.row, first_row, end)

    def _tables(
        self, file: SourceFile, stream: pa.NativeFile, header: list[str], schema: pa.Schema, begin: Cut
    ) -> Iterator[pa.Table]:
        rows = begin.row
        for batch in self._text_batches(file, stream, header, schema.names, is_first=begin.at == 0):
            columns = []
            for field in schema:
                text = batch.column(field.name)
                try:
                    columns.append(self._typed(text, field.type))
                except pa.ArrowException as error:
                    bad = first_bad_row(self.cells(text), field.type)
                    cell = text[bad].as_py()
                    # A word that means "missing" does so in all columns, where a number may be right.
                    repair = "repair the line" if _is_number(cell) else missing_advice([shorten(cell)])
                    raise DataError(
                        f"{file.uri}, {self._place(file, rows + bad, cell)} in column {field.name!r}, "
                        f"which does not read as {field.type}",
                        next_step=f"{repair}; or set data.types: {{{in_yaml(field.name)}: string}}",
                    ) from error
            yield pa.table(columns, schema=schema)
            rows += batch.num_rows

    def cells(self, text: pa.Array) -> pa.Array:
        """Return the cells of a column other than text, as Arrow reads them."""
        return without_words(self._form.pointed(text), self._form.null_words)

    def _typed(self, text: pa.Array, kind: pa.DataType) -> pa.Array:
        if kind in (pa.string(), pa.large_string()):
            return pc.cast(text, kind)
        return cast_array(self.cells(text), kind)

    def _shown(self, value: str | None) -> str | None:
        """Return a cell of `pointed` as the file has it."""
        return value if value is None else self._form.pointed(pa.array([value]))[0].as_py()  # type: ignore[no-any-return]

    def _header(self, file: SourceFile) -> list[str]:
        try:
            with self._form.open(file) as stream:
                head = stream.read(1 << 20)
        except UnicodeError as error:
            raise self._not_of_encoding(file, error) from error
        except (OSError, pa.ArrowException) as error:
            raise read_problem(file.uri, error) from error
        if what := looks_like(file) if b"\0" in head[:512] or head[:4] in (b"PAR1", b"<!DO", b"<htm") else "":
            advice = "set data.csv: {encoding: utf-16}" if what == "UTF-16 text" else ""
            raise DataError(f"{file.uri}: this is {what}, not CSV", next_step=advice)
        text = head.decode("utf-8-sig", errors="replace")
        if self._form.options.header:
            return self._form.options.header
        header: list[str] = next((row for row in self._form.parsed(file, io.StringIO(text, newline="")) if row), [])
        if (
            self._form.options.delimiter is None
            and len(header) == 1
            and (other := next((sign for sign in ";\t|" if sign in header[0]), ""))
        ):
            raise DataError(
                f"{file.uri}: its columns are separated by {other!r}, not by a comma",
                next_step=f"set data.csv: {{delimiter: {json.dumps(other)}}}",
            )
        if odd := next((name for name in header if "\ufffd" in name), None):
            raise DataError(
                f"{file.uri}: the column name {odd!r} in its first line is not UTF-8",
                next_step="set its encoding, as in data.csv: {encoding: latin1}",
            )
        repeated = sorted(name for name, count in Counter(header).items() if count > 1)
        if repeated:
            raise DataError(
                f"{file.uri}: column {repeated[0]!r} is in the header twice",
                next_step="name the columns in its place: data.csv: {header: [NAME, ...], skip_rows: 1}",
            )
        if header and all(_is_number(name) for name in header):
            raise DataError(
                f"{file.uri}: the first line holds values ({shorten(','.join(header))}), not the names of the columns",
                next_step="put a header line before it, or name the columns: data.csv: {header: [NAME, ...]}",
            )
        return header

    def _raw_batches(
        self, file: SourceFile, stream: pa.NativeFile | _LineCounter, header: list[str], wanted: list[str], *, is_first: bool
    ) -> Iterator[pa.RecordBatch]:
        """Yield all cells as text. An empty cell is null, an empty pair of quotes is empty text."""
        batches = arrow_csv.open_csv(
            stream,
            read_options=arrow_csv.ReadOptions(
                # Some rows at once, however many columns: each batch has a cost for each column.
                block_size=max(_BLOCK_BYTES, len(header) << 10),
                use_threads=False,
                column_names=self._form.options.header if is_first else header,
                skip_rows=self._form.options.skip_rows if is_first else 0,
            ),
            parse_options=arrow_csv.ParseOptions(
                delimiter=self._form.delimiter(file), quote_char=self._form.options.quote or False, newlines_in_values=True
            ),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(header, pa.string()),
                include_columns=wanted,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
        for batch in batches:
            if self._form.options.nulls is not None:
                columns = [self._form.without_nulls(column) for column in batch.columns]
                batch = pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
            yield batch

    def _text_batches(
        self,
        file: SourceFile,
        stream: pa.NativeFile | _LineCounter,
        header: list[str],
        wanted: list[str],
        *,
        is_first: bool = True,
    ) -> Iterator[pa.RecordBatch]:
        """As `_raw_batches`; a problem is named by its line."""
        try:
            yield from self._raw_batches(file, stream, header, wanted, is_first=is_first)
        except UnicodeError as error:
            raise self._not_of_encoding(file, error) from error
        except pa.ArrowInvalid as error:
            with self._form.open(file) as again:
                place = bad_utf8(again)
            if place:
                raise DataError(
                    f"{file.uri}: {place}",
                    next_step="repair the line; or set the encoding of the files: data.csv: {encoding: cp1252}",
                ) from error
            problems = self._broken_records(file, header)
            if not problems and "straddl" in str(error):
                problems = [f"a row is longer than {_BLOCK_BYTES >> 20} MiB, the most that is read; keep such texts in Parquet"]
            raise _broken(file, problems or [" ".join(str(error).split())], header) from error
        except OSError as error:
            raise read_problem(file.uri, error) from error
        finally:
            stream.close()

    def _refuse_utf8(self, file: SourceFile) -> None:
        """Refuse a file of UTF-8 among others: it would pass unseen, since its bytes are letters of the others' encoding."""
        named = self._form.options.encoding
        if not self._form.has_one_byte_letters:
            return
        with open_stream(file.uri) as stream:
            found = misread(stream, named)
        if found is not None:
            raise DataError(
                f"{file.uri}: is UTF-8, not {named}: {found[0]!r} would be read as {found[1]!r}",
                next_step=f"convert it: iconv -f utf8 -t {named}; or if all files are UTF-8, leave data.csv.encoding out",
            )

    def _not_of_encoding(self, file: SourceFile, error: UnicodeError) -> DataError:
        named = self._form.options.encoding
        return DataError(f"{file.uri}: is not {named}: {error}", next_step="correct data.csv: {encoding: ...}")

    def _broken_records(self, file: SourceFile, header: list[str]) -> list[str]:
        """Go through the file with Python's strict parser, 10 times slower, to find the lines."""
        problems = []
        for start, row, problem in self._form.records(file):
            if problem:
                problems.append(problem)
            elif row and len(row) != len(header):
                problems.append(f"line {start} has {len(row)} instead of {len(header)} fields: {shorten(','.join(row))}")
        return problems

    def lines(self, file: SourceFile, rows: Collection[int]) -> dict[int, int]:
        """See `Reader.lines`."""
        seen, last = -1 - (not self._form.options.header), max(rows, default=-1)  # a header is a record too
        found: dict[int, int] = {}
        for start, fields, _ in self._form.records(file):
            seen += bool(fields)
            if fields and seen in rows:
                found[seen] = start
            if seen >= last:
                break
        return found

    def _place(self, file: SourceFile, row: int, value: object) -> str:
        """Format `line 12 holds 'abc'`, for a row counted from 0."""
        start = self.lines(file, (row,)).get(row)
        place = f"row {row} (from 0)" if start is None else f"line {start} (row {row} from 0)"
        return f"{place} holds {shorten(value)}"


def _broken(file: SourceFile, problems: list[str], header: list[str]) -> DataError:
    more = f" (and {len(problems) - 1} more such lines)" if len(problems) > 1 else ""
    advice = "repair the lines"
    if "quote" in problems[0]:
        advice += '; or if quotes enclose no fields in these files: data.csv: {quote: ""}'
    if any("#" in problem or "\\" in problem for problem in problems[:3]):
        advice += "; comments and escapes are not read: " + _CONVERT
    if len(header) == 1:
        advice += f"; or if {header[0]!r} in the first line names no column, leave that out: data.csv: {{skip_rows: 1}}"
    return DataError(f"{file.uri}: {problems[0]}{more}", problems=capped(problems[1:]), next_step=advice)


class _LineCounter:
    """A stream that counts the lines read through it, and notes where rows begin if each of them is one line.

    Args:
        before_rows: lines before the first row.
    """

    def __init__(self, stream: pa.NativeFile, before_rows: int) -> None:
        self._stream = stream
        self._before_rows = before_rows
        self._ends = self._read = 0
        self._last = b"\n"
        self.cuts = Cuts()
        self.are_plain = True
        """Whether no line ends with a carriage return alone, which is not counted here."""
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
        returns = block.count(b"\r")
        self.are_plain = self.are_plain and (not returns or returns == block.count(b"\r\n"))
        if self._ends > self._before_rows and (end := block.rfind(b"\n") + 1):
            self.cuts.add(self._ends - self._before_rows, self._read + end, self._ends + 1)
        self._read += len(block)
        return block

    def close(self) -> None:
        """Close the stream below."""
        self._stream.close()
        self.closed = True


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
