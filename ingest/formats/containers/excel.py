"""How does a sheet of a workbook become rows? Its first line names the columns, and each column has one kind of cells."""

from __future__ import annotations

import datetime
import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pydantic import NonNegativeInt

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.type_text import parse_type
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import read_bytes
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.reader import FileFacts, Reader, conform, library, reading
from penstock.ingest.spec import DataSpec
from penstock.messages import in_yaml, shorten

__all__ = ["ExcelFormat", "ExcelOptions", "ExcelReader"]

_KINDS: tuple[tuple[type, pa.DataType], ...] = (
    (bool, pa.bool_()),
    (float, pa.float64()),
    (int, pa.int64()),
    (str, pa.string()),
    (datetime.datetime, pa.timestamp("us")),
    (datetime.time, pa.time64("us")),
    (datetime.timedelta, pa.duration("us")),
)
"""The first that a cell is an instance of is its kind."""


class ExcelOptions(Section):
    """Which part of a workbook holds the rows."""

    sheet: str | NonNegativeInt = 0
    """The sheet's name, or its number from 0."""
    skip_rows: NonNegativeInt = 0
    """Lines above the one that names the columns. Empty lines above and columns left of the sheet's first cell do not count."""


class ExcelFormat(Format):
    """A sheet whose first line names the columns; numbers that are all whole are integers."""

    extensions = (".xlsx", ".xls", ".xlsb", ".ods")
    libraries = ("python-calamine",)
    Options = ExcelOptions

    def reader(self, data: DataSpec, options: ExcelOptions) -> ExcelReader:
        """Read sheets."""
        return ExcelReader(options, data)


class ExcelReader(Reader):
    """One sheet of each workbook, whole: it has a million lines at most."""

    def __init__(self, options: ExcelOptions, data: DataSpec) -> None:
        self._options = options
        self._as_text = {name for name, kind in data.types.items() if kind in ("string", "large_string")}
        self._as_floats = {name for name, kind in data.types.items() if parse_type(kind) in (pa.float32(), pa.float64())}

    def inspect(self, file: SourceFile) -> FileFacts:
        """Read the sheet."""
        table = self._table(file)
        return FileFacts({field.name: field.type for field in table.schema}, table.num_rows)

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the sheet's rows."""
        yield conform(self._table(file), schema, file, 0)

    def lines(self, file: SourceFile, rows: Any) -> dict[int, int]:
        """See `Reader.lines`."""
        return {row: row + 2 + self._options.skip_rows for row in rows}

    def _table(self, file: SourceFile) -> pa.Table:
        lines = self._lines(file)[self._options.skip_rows :]
        if not lines:
            raise DataError(f"{file.uri}: the sheet has no line that names the columns", next_step="correct data.excel")
        names = [_text(cell).strip() for cell in lines[0]]
        if unnamed := [str(index + 1) for index, name in enumerate(names) if not name]:
            raise DataError(
                f"{file.uri}: the first line names no column {', '.join(unnamed)}",
                next_step="name it, or set where the names are (data.excel: {skip_rows: N})",
            )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"{file.uri}: column {twice[0]!r} is there twice", next_step="rename one")
        columns = [self._column(file, name, [line[index] for line in lines[1:]]) for index, name in enumerate(names)]
        return pa.table(columns, names=names)

    def _lines(self, file: SourceFile) -> list[list[Any]]:
        calamine = library("python_calamine", "excel", "excel")
        with reading(file, "Excel"):
            book = calamine.CalamineWorkbook.from_filelike(io.BytesIO(read_bytes(file.uri)))
            wanted = self._options.sheet
            names = book.sheet_names
            if wanted not in names and not (isinstance(wanted, int) and wanted < len(names)):
                raise DataError(
                    f"{file.uri}: there is no sheet {wanted!r}; it has {', '.join(names)}", next_step="correct data.excel.sheet"
                )
            sheet = book.get_sheet_by_name(wanted) if isinstance(wanted, str) else book.get_sheet_by_index(wanted)
            return sheet.to_python(skip_empty_area=True)  # type: ignore[no-any-return]

    def _column(self, file: SourceFile, name: str, cells: list[Any]) -> pa.Array:
        values = [_value(cell) for cell in cells]
        found: dict[pa.DataType, int] = {}
        for row, value in enumerate(values):
            if value is not None:
                found.setdefault(next(kind for python, kind in _KINDS if isinstance(value, python)), row)
        if (name in self._as_text and len(found) > 1) or found.keys() == {pa.string()}:
            return pa.array([value if value is None else _text(value) for value in values], pa.string())
        if len(found) > 1 and found.keys() != {pa.int64(), pa.float64()}:
            (first, second) = sorted(found.values())[:2]
            raise DataError(
                f"{file.uri}: column {name!r} holds {shorten(values[first])} in row {first} (from 0), and in row {second} "
                f"{shorten(values[second])}",
                next_step=f"give its cells one kind, or set data.types: {{{in_yaml(name)}: string}}",
            )
        if found and found.keys() <= {pa.int64(), pa.float64()}:
            return self._numbers(file, name, values)
        return pa.array(values, next(iter(found), pa.null()))

    def _numbers(self, file: SourceFile, name: str, values: list[Any]) -> pa.Array:
        if not all(value is None or float(value).is_integer() for value in values) or name in self._as_floats:
            return pa.array([value if value is None else float(value) for value in values], pa.float64())
        long = next((row for row, value in enumerate(values) if value is not None and abs(value) >= 2**53), None)
        if long is not None:
            raise DataError(
                f"{file.uri}: column {name!r} holds {values[long]:.0f} in row {long} (from 0): a workbook keeps 15 digits",
                next_step=f"write such numbers as text; or if they are measures, set data.types: {{{in_yaml(name)}: float64}}",
            )
        return pa.array([value if value is None else int(value) for value in values], pa.int64())


def _value(cell: Any) -> Any:
    """Return None for an empty cell, and midnight for a day: a column of times may hold both."""
    if isinstance(cell, datetime.date) and not isinstance(cell, datetime.datetime):
        return datetime.datetime.combine(cell, datetime.time())
    return None if cell == "" else cell


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
