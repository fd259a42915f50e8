"""Which files and rows does a source have, and in which order are they read? A snapshot of files, row counts and one schema."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import pyarrow as pa
from pydantic import field_serializer, field_validator

from penstock.config import Section
from penstock.digest import digest_of
from penstock.errors import DataError, PenstockError
from penstock.ingest.columns.arrays import rebatched
from penstock.ingest.columns.casts import cast_array
from penstock.ingest.columns.type_text import parse_type
from penstock.ingest.files.listing import SourceFile, as_columns, refuse_in_two_splits
from penstock.ingest.files.unchanged import unchanged
from penstock.ingest.formats.reader import FileFacts, Reader
from penstock.ingest.formats.registry import reader_of
from penstock.ingest.phases import phase, timed
from penstock.ingest.ray_tasks import ParallelMap
from penstock.ingest.read.inspection import inspect_files, inspect_head, threads_for
from penstock.ingest.read.unify import SourceColumn, given_types, unify
from penstock.ingest.schema import Split
from penstock.ingest.spec import DataSpec
from penstock.ingest.task_counts import count_rows
from penstock.messages import capped, counted, in_yaml
from penstock.plugins import optional
from penstock.progress import Progress

__all__ = ["RowBatch", "SourceColumn", "SourceSnapshot", "iterate_rows", "opens_files", "read_source"]

_GROUP_BYTES = 64 << 20

_TASK_FILES = 8

_SHOWN_COLUMNS = 5

BATCH_BYTES = 64 << 20
"""About as much of rows that are prepared together, by their mean size; a row that is larger is alone."""


class SourceSnapshot(Section):
    """The source at one moment: every file with its row count, and the schema all of them are read with."""

    version: Literal[1] = 1
    format: str
    files: tuple[SourceFile, ...]
    columns: tuple[SourceColumn, ...]

    @field_serializer("files", when_used="json")
    def _as_columns(self, files: tuple[SourceFile, ...]) -> dict[str, Any]:
        return as_columns(files)

    @field_validator("files", mode="before")
    @classmethod
    def _of_columns(cls, files: Any) -> Any:
        return tuple(SourceFile.of_columns(files)) if isinstance(files, dict) else files

    @property
    def rows(self) -> int:
        """Rows in all files."""
        return sum(file.rows or 0 for file in self.files)

    @property
    def digest(self) -> str:
        """Digest of the names and content of the files, at any place: 32 hex characters."""
        files = [(file.location, file.name, file.size_bytes, file.fingerprint, file.rows) for file in self.files]
        return digest_of([self.format, files, [(column.name, column.type) for column in self.columns]])

    def describe_missing_columns(self) -> str:
        """Describe the columns that are null in files that lack them; empty if no file lacks one."""
        missing = []
        for name in dict.fromkeys(name for file in self.files for name in file.lacks):
            without = [file for file in self.files if name in file.lacks]
            rows = counted(sum(file.rows or 0 for file in without), "row")
            where = without[0].name if len(without) == 1 else f"{len(without)} files (first {without[0].name})"
            missing.append(f"{name!r} in {rows} of {where}")
        shown = ", ".join(capped(missing, _SHOWN_COLUMNS))
        return (
            f"null because the file has no such column: {shown}; where one was renamed, give it its old name again"
            if missing
            else ""
        )

    def arrow_schema(self) -> pa.Schema:
        """Return the schema of every table that `iterate_rows` yields."""
        return pa.schema([pa.field(column.name, parse_type(column.type)) for column in self.columns])


class RowBatch(NamedTuple):
    """Some rows of one file, or of several files that are one row each."""

    table: pa.Table
    """The unified schema."""
    first_row: int
    """Index of the first row in its file."""
    files: tuple[SourceFile, ...]
    """The file of each row where files are one row each (images, `text.rows: file`), else one file."""


def read_source(
    data: DataSpec,
    files: list[SourceFile],
    progress: Progress,
    *,
    parallel: ParallelMap | None = None,
    only_heads: bool = False,
    keep: bool = False,
) -> SourceSnapshot:
    """Open every file, check it, and settle on one schema.

    Args:
        parallel: where the files are inspected; None for threads of this process.
        only_heads: inspect the beginning of large files only, for a sample of the rows there.
        keep: keep parsed rows on the node, for the stages that read them next (the plug-in `parsed`).

    Raises:
        SpecError: `data` names a column or type that does not exist.
        DataError: files are empty, damaged, of another kind, or disagree; all of them are listed.
        ServiceError: a store stopped answering.
    """
    given_types(data)
    reader = reader_of(data)
    facts: list[FileFacts] = []
    problems: list[DataError] = []
    if only_heads:
        inspected = [inspect_head(reader, file) for file in files]
    else:
        inspected = inspect_files(data, files, progress, parallel, keep=keep)
    for result in inspected:
        if isinstance(result, DataError):
            problems.append(result)
        elif isinstance(result, PenstockError):
            raise result
        else:
            facts.append(result)
    if problems:
        raise _joined(problems, len(files))
    _refuse_empty(data, files, facts)
    if not reader.one_row_per_file:  # single rows are compared when they are prepared
        filled = (file for file, fact in zip(files, facts, strict=True) if fact.rows and file.content is not None)
        refuse_in_two_splits(((file.content, file.size_bytes), file) for file in filled)
    columns = unify(data, reader, files, facts)
    in_files = [column.name for column in columns if not column.from_folder and not reader.missing_is_null]
    return SourceSnapshot(
        format=data.format,
        files=tuple(
            file.with_facts(
                rows=fact.rows,
                cuts=fact.cuts,
                lacks=tuple(name for name in in_files if name not in fact.columns),
                row_bytes=fact.row_bytes,
            )
            for file, fact in zip(files, facts, strict=True)
        ),
        columns=tuple(columns),
    )


def _refuse_empty(data: DataSpec, files: Sequence[SourceFile], facts: Sequence[FileFacts]) -> None:
    """Refuse locations without rows. A file may have none beside others: Spark and Dask write such parts."""
    rows: dict[Split, int] = {}
    for file, fact in zip(files, facts, strict=True):
        rows[file.location] = rows.get(file.location, 0) + fact.rows
    for split, count in rows.items():
        if not count:
            named = f"{files[0].uri} holds" if len(files) == 1 else f"the files of data.{split} hold"
            raise DataError(f"{named} no rows", next_step=f"write {data.place(split)} again, or correct data.{split}")


def iterate_rows(
    data: DataSpec,
    snapshot: SourceSnapshot,
    files: Sequence[SourceFile],
    batch_rows: int = 4096,
    piece: tuple[int, int] | None = None,
) -> Iterator[RowBatch]:
    """Yield the rows of `files` in their order, up to `batch_rows` at a time, in bounded memory.

    `files` are of the snapshot. They are read in the snapshot's format; the format of `data` gives the columns their meaning.
    A batch never mixes locations. It holds rows of one file, except where a file is one row (see `RowBatch.files`).

    Args:
        piece: one of the reader's `pieces` of the only file: its first row, and its end.

    Raises:
        DataError: a damaged file, a value that does not fit its column's type, or a file that changed since the snapshot.
    """
    reader = reader_of(data, snapshot.format)
    if reader.one_row_per_file:
        for batch in _grouped(data, reader, snapshot, files, batch_rows):
            count_rows(batch.table.num_rows, batch.table.nbytes)
            yield batch
        return
    for file in files:
        first_row, end = piece or (0, file.rows)
        with unchanged((file,)):
            tables = rebatched(_tables(data, reader, file, snapshot, batch_rows, piece), batch_rows, BATCH_BYTES)
            for table in timed("read", (table.combine_chunks() for table in tables)):
                count_rows(table.num_rows, table.nbytes)
                yield RowBatch(table, first_row, (file,))
                first_row += table.num_rows
        if first_row != end:
            raise DataError(
                f"{file.uri}: had {counted(file.rows or 0, 'row')} when the source was read and has {first_row} now",
                next_step="run again; files must not change while a pipeline reads them",
            )


def _joined(problems: list[DataError], num_files: int) -> DataError:
    if len(problems) == 1:
        return problems[0]
    advice = list(dict.fromkeys(problem.next_step for problem in problems if problem.next_step))
    return DataError(
        f"{len(problems)} of {num_files} source files cannot be used",
        problems=capped([problem.message for problem in problems]),
        next_step="; ".join(capped(advice, 3)),
    )


def _tables(
    data: DataSpec,
    reader: Reader,
    file: SourceFile,
    snapshot: SourceSnapshot,
    batch_rows: int,
    piece: tuple[int, int] | None = None,
) -> Iterator[pa.Table]:
    """Yield the reader's tables, and add columns whose values are in the folders' names, or that the file lacks."""
    schema = snapshot.arrow_schema()
    values = file.folder_columns
    constant = {column.name: values.get(column.name) for column in snapshot.columns if column.from_folder}
    constant |= dict.fromkeys(file.lacks)
    in_file = pa.schema([field for field in schema if field.name not in constant])
    begin, end = piece or (0, file.rows or 0)
    if not len(in_file):  # a table without columns has no rows either
        for first_row in range(begin, end, batch_rows):
            rows = min(batch_rows, end - first_row)
            yield pa.table([_constant(file, field, constant[field.name], rows) for field in schema], schema=schema)
        return
    kept = optional("penstock.ingest.read.parsed.rows:parsed_tables") if reader.hands_on_rows else None
    tables = None if kept is None else kept(data, snapshot.format, file, in_file, piece)
    if tables is None:
        tables = reader.tables(file, in_file, batch_rows) if piece is None else reader.piece(file, in_file, batch_rows, *piece)
    for table in tables:
        if constant:
            columns = [
                _constant(file, field, constant[field.name], table.num_rows)
                if field.name in constant
                else table.column(field.name)
                for field in schema
            ]
            table = pa.table(columns, schema=schema)
        yield table


def _constant(file: SourceFile, field: pa.Field, value: str | None, rows: int) -> pa.Array:
    if value is None:
        return pa.nulls(rows, field.type)
    try:
        return cast_array(pa.repeat(pa.scalar(value, pa.string()), rows), field.type)
    except pa.ArrowException as error:
        raise DataError(
            f"{file.uri}: the folder is named {field.name}={value}, which does not read as {field.type}",
            next_step=f"rename the folder, or set data.types: {{{in_yaml(field.name)}: string}}",
        ) from error


def opens_files(data: DataSpec, snapshot: SourceSnapshot) -> bool:
    """Whether the values of the snapshot's columns are in the files, and not all in their names."""
    reader = reader_of(data)
    return not (reader.one_row_per_file and _is_in_names(reader, snapshot))


def _is_in_names(reader: Reader, snapshot: SourceSnapshot) -> bool:
    return all(column.from_folder or column.name in reader.in_name for column in snapshot.columns)


def _grouped(
    data: DataSpec, reader: Reader, snapshot: SourceSnapshot, files: Sequence[SourceFile], batch_rows: int
) -> Iterator[RowBatch]:
    opened = not _is_in_names(reader, snapshot)
    with ThreadPoolExecutor(threads_for(files) if files else 1) as pool:
        group: list[SourceFile] = []
        num_bytes = 0
        for file in files:
            row_bytes = (file.row_bytes or file.size_bytes) if opened else 0
            full = len(group) >= batch_rows or num_bytes + row_bytes > _GROUP_BYTES
            if group and (full or group[0].location != file.location):
                yield _batch_of(data, reader, snapshot, group, pool, opened=opened)
                group, num_bytes = [], 0
            group.append(file)
            num_bytes += row_bytes
        if group:
            yield _batch_of(data, reader, snapshot, group, pool, opened=opened)


def _batch_of(
    data: DataSpec, reader: Reader, snapshot: SourceSnapshot, group: list[SourceFile], pool: Executor, *, opened: bool
) -> RowBatch:
    # One file a task would cost more than reading a small file does.
    parts = [group[start : start + _TASK_FILES] for start in range(0, len(group), _TASK_FILES)]
    with unchanged(group, pool.map) if opened else nullcontext(), phase("read"):
        tables = list((pool.map if opened else map)(partial(_one_row_each, data, reader, snapshot), parts))
    return RowBatch(pa.concat_tables(tables).combine_chunks(), 0, tuple(group))


def _one_row_each(data: DataSpec, reader: Reader, snapshot: SourceSnapshot, files: Sequence[SourceFile]) -> pa.Table:
    schema = snapshot.arrow_schema()
    if any(column.from_folder for column in snapshot.columns) or any(file.lacks for file in files) or not len(schema):
        return pa.concat_tables([next(_tables(data, reader, file, snapshot, 1)) for file in files])
    return reader.rows(files, schema)
