"""How is one unit scored? Its files are read in batches, and its record, which makes its rows count, is written last.

Runs in a worker, which holds the model.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.digest import digest_of
from penstock.errors import DataError
from penstock.ingest.columns.casts import cast_array, is_text, promote
from penstock.ingest.columns.type_text import has_type_text, parse_type, type_text
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.formats.reader import FileFacts, Reader
from penstock.ingest.formats.registry import format_named, reader_of
from penstock.ingest.preprocess.problems import Origin
from penstock.ingest.read.inspection import inspect_file
from penstock.ingest.read.snapshot import RowBatch, SourceColumn, SourceSnapshot, iterate_rows
from penstock.ingest.spec import DataSpec
from penstock.messages import capped, did_you_mean, shorten
from penstock.plugins import optional
from penstock.storage import Storage
from penstock.training.predict.output import SIDE, Output, PredictedUnit, content_of, part_name
from penstock.training.registry.loaded_model import LoadedModel

__all__ = ["ADDED", "FORMAT", "Scorer", "ScoringJob", "packed_model"]

FORMAT = 2
"""Raised by one when the same inputs would give other parts."""

ADDED = ("file", "row")
"""Columns with the place of a row: the file's path below the input, and the row in it, from 0."""


@dataclass(frozen=True)
class ScoringJob:
    """The input of a worker that scores one unit, besides the model.

    Attributes:
        files: of one unit.
        data: how they are read.
        columns: of the source, to be kept; None for all but encoded images.
        asked: digest of the model and of all here but the files.
        model: its address, for people.
    """

    files: tuple[SourceFile, ...]
    data: DataSpec
    columns: tuple[str, ...] | None
    asked: str
    model: str
    storage: Storage
    piece: tuple[int, int] | None = None
    """First row and end of the rows of the only file; None for all."""

    @property
    def key(self) -> str:
        """Name the unit by its files, not by what they hold: scored again, its parts take the place of the old ones."""
        return digest_of([[file.name for file in self.files], self.piece])


def packed_model(folder: Path) -> dict[str, np.ndarray]:
    """Read the files of a model's folder into arrays, which the processes of a node share in Ray."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): np.fromfile(path, np.uint8) for path in files}


class Scorer:
    """Scores units with a model that is loaded once.

    Args:
        files: as `packed_model` gives them.
    """

    def __init__(self, files: Mapping[str, np.ndarray]) -> None:
        with tempfile.TemporaryDirectory(prefix="penstock-model-") as folder:
            for name, content in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                content.tofile(path)
            self._model = LoadedModel(folder)

    def __call__(self, job: ScoringJob) -> PredictedUnit | DataError:
        """Score a unit, commit it, and return its record; or why its files cannot be read, a problem of this unit alone."""
        started = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(prefix="penstock-unit-") as folder:
                unit = _score(self._model, job, Path(folder), started)
        except DataError as error:
            return _of_file(error, job)
        finally:
            if forget := optional("penstock.ingest.read.parsed.rows:forget_parsed"):
                forget(job.data, job.data.format, job.files)
        Output(job.storage).commit(unit)
        return unit


def _of_file(error: DataError, job: ScoringJob) -> DataError:
    """Add the name of the file: the model knows the number of a row only."""
    if any(file.uri in error.message for file in job.files):
        return error
    return DataError(f"{job.files[0].uri}: {error.message}", problems=error.problems, next_step=error.next_step)


def _score(model: LoadedModel, job: ScoringJob, folder: Path, started: float) -> PredictedUnit:
    source = _Source(model, job)
    scored, unscored = _Part(folder / "scored.parquet"), _Part(folder / "unscored.parquet")
    if source.broken:
        names, reasons = zip(*((file.name, problem) for file, problem in source.broken), strict=True)
        unscored.add(pa.table({"reason": reasons, "file": names, "row": np.zeros(len(names), np.int64)}))
    unseen = Counter[str]()
    for batch, table in source.batches():
        found = model.score(table)
        unseen.update(found.unseen)
        if found.table.num_rows:
            held = table.select(source.kept)
            kept = held if len(found.rows) == table.num_rows else held.take(pa.array(found.rows))
            scored.add(pa.table({**_columns(source.typed(kept)), **_columns(found.table), **_places(batch, found.rows)}))
        if found.problems:
            rows = np.array(sorted(found.problems), np.int64)
            # The number that a problem begins with is that of the batch.
            shown = [source.as_in_file(batch, table, row, found.problems[row]) for row in rows.tolist()]
            reasons = pa.array([text.removeprefix(f"row {row}: ") for row, text in zip(rows, shown, strict=True)], pa.string())
            unscored.add(pa.table({"reason": reasons, **_places(batch, rows)}))
    name = part_name(job.key)
    Output(job.storage).begin(job.key)
    return PredictedUnit(
        key=job.key,
        asked=job.asked,
        model=job.model,
        files={file.name: content_of(file) for file in job.files},
        piece=job.piece,
        rows=scored.rows,
        unscored=unscored.rows,
        part_bytes=scored.put(job.storage, name),
        side_bytes=unscored.put(job.storage, f"{SIDE}/{name}"),
        unseen=dict(sorted(unseen.items())),
        seconds=round(time.monotonic() - started, 3),
    )


class _Source:
    """Reads the files of a unit as the model needs them. Columns may differ between units.

    A column that the model knows is read in the model's type if that loses nothing, so that a value that does not fit is a
    problem of its row, not of its file.

    Raises:
        DataError: a file cannot be read, lacks a column, or has one that the output adds.
    """

    def __init__(self, model: LoadedModel, job: ScoringJob) -> None:
        self._wanted = {field.name: field.type for field in model.inputs}
        self._unneeded = set(model.unneeded)
        self._job, self._batch_rows = job, model.rows_at_once
        self._reader, form = reader_of(job.data), format_named(job.data.format)
        facts, self.broken = _facts(self._reader, job)
        found = {name: kind for fact in facts.values() for name, kind in fact.columns.items()}
        folders = job.files[0].folder_columns if form.folder_columns else {}
        columns = {name: self._read_as(name, kind) for name, kind in found.items()}
        columns |= {name: parse_type(job.files[0].folder_type(name)) for name in folders if name not in found}
        needed = [name for name in self._wanted if name not in self._unneeded]
        if self._reader.missing_is_null:
            columns = {name: self._wanted[name] for name in needed if name not in columns} | columns
        self.kept = _kept(job, list(columns), form.encoded_images) if facts else []
        columns = {name: kind for name, kind in columns.items() if name in self.kept or name in needed}
        if odd := next((name for name, kind in columns.items() if not has_type_text(kind)), None):
            raise DataError(
                f"{job.files[0].uri}: column {odd!r} is {columns[odd]}, a type that cannot be read",
                next_step="leave it out: --column NAME, once for each column to keep",
            )
        self._text = [name for name in needed if columns.get(name) == pa.string() and not is_text(self._wanted[name])]
        self._snapshot = SourceSnapshot(
            format=job.data.format,
            files=tuple(
                file.model_copy(update={"rows": facts[file.uri].rows, "row_bytes": facts[file.uri].row_bytes})
                for file in job.files
                if file.uri in facts
            ),
            columns=tuple(
                SourceColumn(name=name, type=type_text(kind), from_folder=name in folders and name not in found)
                for name, kind in columns.items()
            ),
        )

    def _read_as(self, name: str, found: pa.DataType) -> pa.DataType:
        if name in self._job.data.types:
            return parse_type(self._job.data.types[name])
        wanted = self._wanted.get(name, found)
        if promote(found, wanted) == wanted:
            return wanted
        if name in self._unneeded and self._reader.missing_is_null:  # in such formats a number is not a text
            return found
        # The text of the file, not that of a number or a time parsed from it.
        return pa.string() if is_text(wanted) and pa.types.is_primitive(found) else found

    def batches(self) -> Iterator[tuple[RowBatch, pa.Table]]:
        """Yield all rows in order."""
        for batch in iterate_rows(self._job.data, self._snapshot, self._snapshot.files, self._batch_rows, self._job.piece):
            table = batch.table
            for name in self._text:
                cells = self._reader.cells(table.column(name))
                table = table.set_column(table.schema.get_field_index(name), name, cells)
            yield batch, table

    def as_in_file(self, batch: RowBatch, table: pa.Table, row: int, problem: str) -> str:
        """Show the cell of a problem as the file has it."""
        for name in self._text:
            cell, shown = (f"{name!r} holds {shorten(held.column(name)[row].as_py())}," for held in (table, batch.table))
            problem = problem.replace(cell, shown)
        return problem

    def typed(self, table: pa.Table) -> pa.Table:
        """Cast the columns that the model reads to its types."""
        for index, field in enumerate(table.schema):
            if field.name in self._wanted and field.name not in self._unneeded:
                kind = self._wanted[field.name]
                table = table.set_column(index, field.name, cast_array(table.column(index), kind))
        return table


def _facts(reader: Reader, job: ScoringJob) -> tuple[dict[str, FileFacts], list[tuple[SourceFile, str]]]:
    """Inspect each file; returns facts by URI, and files of one row that cannot be read, with the problem."""
    facts, broken = dict[str, FileFacts](), list[tuple[SourceFile, str]]()
    for file in job.files:
        found = inspect_file(reader, file, job.data)
        if isinstance(found, FileFacts):
            facts[file.uri] = found
        elif reader.one_row_per_file and isinstance(found, DataError):
            broken.append((file, found.message.removeprefix(f"{file.uri}: ")))
        else:
            raise found
    return facts, broken


def _kept(job: ScoringJob, columns: Sequence[str], images: Sequence[str]) -> list[str]:
    added = (*ADDED, "prediction", "probability", "probabilities")
    if job.columns is None:
        kept = [name for name in columns if name not in images]
    else:
        kept = list(job.columns)
        for name in kept:
            if name not in columns:
                raise DataError(
                    f"{job.files[0].uri}: has no column {name!r}{did_you_mean(name, columns)}",
                    next_step=f"choose with --column from {', '.join(capped([*columns]))}",
                )
    taken = [name for name in kept if name in added]
    if taken:
        raise DataError(
            f"{job.files[0].uri}: has a column {taken[0]!r}, which is one that the output adds",
            next_step="choose the columns to keep without it: --column NAME, once for each",
        )
    return kept


class _Part:
    """Writes a Parquet file; none without rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pq.ParquetWriter | None = None
        self.rows = 0

    def add(self, table: pa.Table) -> None:
        """Write rows as a row group."""
        if self._writer is None:
            # Floats hardly repeat: a dictionary of them takes a third of the time of writing.
            repeating = [field.name for field in table.schema if not pa.types.is_floating(field.type)]
            self._writer = pq.ParquetWriter(self._path, table.schema, use_dictionary=repeating)
        self._writer.write_table(table)
        self.rows += table.num_rows

    def put(self, storage: Storage, path: str) -> int:
        """Put the file in place, or delete that of an earlier attempt; returns its bytes."""
        if self._writer is None:
            storage.delete(path)
            return 0
        self._writer.close()
        size = self._path.stat().st_size
        storage.put_file(self._path, path)
        return size


def _places(batch: RowBatch, rows: np.ndarray) -> dict[str, pa.Array]:
    """Return file and row, in that file, of some rows of a batch."""
    origin = Origin.of_batch(batch.files, batch.first_row, batch.table.num_rows).take(rows)
    names = pa.array([file.name for file in batch.files], pa.string())
    return {"file": names.take(pa.array(origin.files)), "row": pa.array(origin.rows)}


def _columns(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    return dict(zip(table.column_names, table.columns, strict=True))
