"""What does a reader of a file format offer, and of which kind is a file really, whatever its name?"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from penstock.errors import DataError, PenstockError, PreflightError
from penstock.ingest.columns.casts import canonical_type, cast_array, first_bad_row
from penstock.ingest.columns.type_text import value_text
from penstock.ingest.files.listing import Cut, SourceFile
from penstock.ingest.files.opening import can_be_cut, open_input, read_problem
from penstock.messages import in_yaml

__all__ = [
    "CUT_BYTES",
    "Cuts",
    "FileFacts",
    "Keep",
    "MostlyNumbers",
    "Reader",
    "conform",
    "last_cut",
    "looks_like",
    "reading",
    "rows_between",
]

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"FEA1", "a Feather version 1 file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"BZh", "a bzip2 file"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard file"),
    (b"PK\x03\x04", "a zip file (or an Excel workbook, or an .npz of numpy)"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"%PDF", "a PDF document"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
    (b"<!DOCTYPE", "an HTML page (a failed download?)"),
    (b"<html", "an HTML page (a failed download?)"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself (run git lfs pull)"),
)

CUT_BYTES = 64 << 20

Keep = Callable[[pa.Table | pa.RecordBatch | None], None]
"""Takes all rows, in their order, as `tables` would give them if the source has the types that were found so far; None once it
would give others."""


class MostlyNumbers(NamedTuple):
    """Evidence about a text column of a CSV file: how much of it reads as numbers, and what does not."""

    numbers: int
    values: int
    first_text: str
    """The place of the first value that is not a number, and what it holds; empty if all are numbers."""


class FileFacts(NamedTuple):
    """The result of one look through a file."""

    columns: Mapping[str, pa.DataType]
    """Canonical types (penstock.ingest.columns.casts), in the file's order."""
    rows: int
    mostly_numbers: Mapping[str, MostlyNumbers] = {}
    """Only of text columns of formats that have no types of their own."""
    cuts: tuple[Cut, ...] = ()
    """Where the file can be read from, if that is known."""
    row_bytes: int | None = None
    """Of a file that is one row, about what the row takes in memory, if that is another size than the file's."""


class Reader(Protocol):
    """Reads the files of one pipeline in one format. Derive from it, so that what you leave out has its default.

    A reader holds no open file, and is used by several threads at once. Every file is inspected once, in Ray workers where
    there is much to read; they make readers of their own, and read each file once for every pass over the rows.
    """

    one_row_per_file: bool = False
    """Whether each file is one row: then rows of many files are read together."""
    in_name: frozenset[str] = frozenset()
    """Columns whose values are in a file's name: `rows` of no others do not open the file."""
    missing_is_null: bool = False
    """Whether a column that a file does not have is null there, rather than an error."""
    inspects_rows: bool = True
    """Whether `inspect` reads all of a file."""
    hands_on_rows: bool = False
    """Whether `inspect` takes a second argument, a `Keep` that gets the rows that it parses; else they are not kept."""

    def inspect(self, file: SourceFile) -> FileFacts:
        """Look through a file that is not empty, in bounded memory: its columns, in canonical types, and its number of rows.

        Raises:
            DataError: the file is damaged or of another kind; names the place of the first thing wrong. Of several files with
                problems all are reported.
            ServiceError: a store stopped answering (`read_problem` of penstock.ingest.files.opening decides between the two).
        """

    def inspect_head(self, file: SourceFile, head_bytes: int) -> FileFacts | None:
        """Look through about the first `head_bytes` of a file only; None where that cannot be done.

        Raises:
            Exception: any; the file is then inspected as a whole, which finds its problems.
        """
        return None

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield all rows in the order of the file, the same each time, in bounded memory.

        Args:
            schema: columns and types of every table, which may be fewer columns than the file has, and wider types.
            batch_rows: a good number of rows for a table; any other is allowed.

        Raises:
            DataError: a value does not fit the schema, or the file is damaged; names file, row and value.
            ServiceError: a store stopped answering.
        """

    def rows(self, files: Sequence[SourceFile], schema: pa.Schema) -> pa.Table:
        """Read files that are one row each, together; raises as `tables`. To override where a table each costs much."""
        return pa.concat_tables([next(self.tables(file, schema, 1)) for file in files])

    def pieces(self, file: SourceFile, piece_bytes: int) -> list[tuple[int, int]]:
        """Return first row and end of the pieces, of about so many bytes, in which `piece` can read a large file.

        Empty where it can only be read from its beginning.
        """
        return [(cut.row, following.row) for cut, following in pairwise((*file.cuts, Cut(file.rows or 0, 0, 0)))]

    def piece(self, file: SourceFile, schema: pa.Schema, batch_rows: int, first_row: int, end: int) -> Iterator[pa.Table]:
        """As `tables`, of the rows from `first_row` to `end`: not called where there are no `pieces`.

        The rows may begin and end anywhere; it is quick where they begin with a piece, or soon after.
        """
        return iter(())

    def cells(self, text: Any) -> Any:
        """Return a column of text as `tables` takes it where another type is wanted: without words for null, with a point."""
        return text

    def lines(self, file: SourceFile, rows: Collection[int]) -> dict[int, int]:
        """Row, from 0 -> the line, from 1, that it begins at. Empty where the file has no lines."""
        return {}


class Cuts:
    """Collects the places of a file that reading may begin at, `CUT_BYTES` apart or more."""

    def __init__(self) -> None:
        self._found = [Cut(0, 0, 1)]

    def add(self, row: int, at: int, line: int) -> None:
        """Take the next place: `row`, from 0, begins at byte `at`, in `line`, from 1."""
        if at - self._found[-1].at >= CUT_BYTES:
            self._found.append(Cut(row, at, line))

    def found(self) -> tuple[Cut, ...]:
        """Return the places; none where there is only the begin."""
        return tuple(self._found) if len(self._found) > 1 else ()


def last_cut(file: SourceFile, row: int) -> Cut:
    """Return the last cut at or before `row`, where reading begins."""
    return max((cut for cut in file.cuts if cut.row <= row), default=Cut(0, 0, 1))


def rows_between(tables: Iterator[pa.Table], at_row: int, first_row: int, end: int) -> Iterator[pa.Table]:
    """Yield the rows from `first_row` to `end` of tables whose first row is `at_row`; no later table is read."""
    if end <= first_row:
        return
    for table in tables:
        if at_row + table.num_rows > first_row:
            skipped = max(0, first_row - at_row)
            yield table.slice(skipped, end - at_row - skipped)
        at_row += table.num_rows
        if at_row >= end:
            return


def conform(table: pa.Table, schema: pa.Schema, file: SourceFile, first_row: int) -> pa.Table:
    """Cast `table` to `schema`.

    Raises:
        DataError: a value does not fit; names file, row (from 0) and value.
    """
    columns = []
    for field in schema:
        values = table.column(field.name)
        try:
            columns.append(cast_array(values, field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            row = first_bad_row(values, field.type)
            raise DataError(
                f"{file.uri}, row {first_row + row} (from 0): column {field.name!r} holds {value_text(values, row)}, "
                f"which does not read as {field.type}",
                next_step=f"repair the row, or set data.types: {{{in_yaml(field.name)}: string}}",
            ) from error
    return pa.table(columns, schema=schema)


def looks_like(file: SourceFile) -> str:
    """Describe the kind of file by its first bytes; empty if they are of no known kind."""
    with open_input(file.uri) as stream:
        head = stream.read(512)
    for magic, what in _MAGIC:
        if head.lstrip().startswith(magic) if magic.startswith(b"<") else head.startswith(magic):
            return what
    if b"\0" in head:
        return "binary data"
    # A cut character at the end of the head does not mean binary data.
    return "text" if head and "\ufffd" not in head.decode("utf-8", errors="replace")[:-1] else ""


@contextmanager
def reading(file: SourceFile, format: str) -> Iterator[None]:
    """Turn whatever a library raises in the block into an error that names the file.

    Raises:
        DataError: the file is gone, damaged or of another kind.
        ServiceError: a store stopped answering.
    """
    try:
        yield
    except (PenstockError, MemoryError):
        raise
    except Exception as error:  # every library has errors of its own
        raise _not_readable(file, format, error) from error


def _not_readable(file: SourceFile, format: str, error: Exception) -> Exception:
    known = read_problem(file.uri, error)
    if not isinstance(known, DataError):
        return known
    try:
        what = looks_like(file) if can_be_cut(file.uri) else ""
    except (OSError, PenstockError):
        return known
    if what and what != "binary data" and format not in what:
        return DataError(f"{file.uri}: this is {what}, not {format}", next_step=_AGAIN)
    shown = " ".join(str(error).split())
    return DataError(f"{file.uri}: damaged, cut off, or not {format} ({shown})", next_step=_AGAIN)


_AGAIN = "write or fetch the file again, or move it out of the folder"


def declared_columns(file: SourceFile, schema: pa.Schema) -> dict[str, pa.DataType]:
    """Return the columns of a file that declares them, in canonical types. Raises DataError if a name is there twice."""
    repeated = sorted(name for name, count in Counter(schema.names).items() if count > 1)
    if repeated:
        raise DataError(f"{file.uri}: column {repeated[0]!r} is there twice")
    return {field.name: canonical_type(field.type) for field in schema}


def library(module: str, format: str, extra: str) -> Any:
    """Import a library that only one format needs.

    Args:
        extra: of penstock, which installs it.

    Raises:
        PreflightError: it cannot be imported here.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PreflightError(
            f"data.format: {format} is read by the package {module.partition('.')[0]}, which cannot be imported here ({error})",
            next_step=f'pip install "penstock[{extra}]", on every node of a cluster too',
        ) from error
