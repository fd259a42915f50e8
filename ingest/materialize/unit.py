"""How is one commit unit made? Its files are read, prepared and written as shards; the record that commits them is last."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import PIL
import psutil
import pyarrow as pa
from pydantic import Field

from penstock.config import Section
from penstock.digest import digest_of, file_digest
from penstock.errors import DataError
from penstock.ingest.columns.arrays import columns_of
from penstock.ingest.files.content_digests import remember_digests
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.formats.registry import format_of, format_origin, format_versions
from penstock.ingest.manifest import UNIT_RECORD, ShardInfo, shard_path, unit_path
from penstock.ingest.materialize.profile import Profile, Profiler
from penstock.ingest.materialize.shard_file import ShardBuffer, with_provenance, write_shard
from penstock.ingest.preprocess.chain import Preparation, decodes_images
from penstock.ingest.preprocess.problems import RowProblem, joined
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.schema import ColumnInfo, Split
from penstock.ingest.spec import split_rules
from penstock.machine.process import ProcessIdentity
from penstock.storage import Storage

__all__ = ["ClassCount", "UnitJob", "UnitRecord", "UnitResult", "begin_unit", "committed", "hashes_path", "unit_key"]

FORMAT = 3
"""Increased when the same inputs would give other shards."""


class ClassCount(Section):
    """Rows of one class in one split of a unit."""

    label: int
    rows: int
    place: str
    """File and row of the first."""


class UnitRecord(Section):
    """`unit.json`: the commit record of a unit, written after its shards."""

    version: Literal[1] = 1
    key: str
    files: tuple[str, ...]
    """Names, in the order of the shards' `_file` column."""
    shards: tuple[ShardInfo, ...]
    columns: tuple[ColumnInfo, ...]
    """Empty if the unit has no rows."""
    rows_read: int
    dropped: dict[str, int] = Field(default_factory=dict)
    """Rows left out, by reason."""
    first_dropped: dict[str, str] = Field(default_factory=dict)
    """File and row of the first, by reason."""
    unseen: dict[str, int] = Field(default_factory=dict)
    """Values per column that one_hot did not know and made zeros."""
    classes: dict[Split, tuple[ClassCount, ...]] = Field(default_factory=dict)
    """Integer labels, by split."""
    hashed: bool = False
    """Whether the rows' hashes are stored beside the shards (`hashes_path`)."""
    profile: Profile
    seconds: float
    """Wall time of making it."""

    def hashed_rows(self) -> dict[Split, int]:
        """Return the rows of each split with stored hashes."""
        rows: Counter[Split] = Counter()
        for shard in self.shards if self.hashed else ():
            rows[shard.split] += shard.rows
        return dict(rows)


class UnitResult(Section):
    """A committed record, or the bad rows that prevent the commit."""

    record: UnitRecord | None
    problems: tuple[RowProblem, ...] = ()


@dataclass(frozen=True)
class UnitJob:
    """Everything that is needed to make a unit; sent to a worker."""

    key: str
    preparation: Preparation
    """Only of the unit's files."""
    shard_bytes: int
    storage: Storage
    again: bool = False
    """Make it although it is committed, because it is damaged. Not part of a key."""

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The unit's files."""
        return self.preparation.snapshot.files

    @property
    def split(self) -> Split:
        """The split of its files; a rule may take rows of train files to another."""
        return self.files[0].location

    @property
    def rows(self) -> int:
        """Rows of the source."""
        first_row, end = self.preparation.piece or (0, sum(file.rows or 0 for file in self.files))
        return end - first_row


def unit_key(job: UnitJob) -> str:
    """Digest everything that the unit's shards depend on. Equal units of different datasets are shared.

    Not part of it: the other files of the source, but for the common schema, and the location of the files.
    """
    of = job.preparation
    data = of.data
    rules: dict[str, Any] = {name: rule.model_dump(mode="json") for name, rule in split_rules(data).items()}
    read = data.model_dump(mode="json", include={"format", "label", "columns", "types", "invalid", "images", data.format})
    if format_of(data).is_kept:
        read.pop(data.format, None)  # these options select rows; they do not change how the kept files are read
    return digest_of(
        {
            "format": FORMAT,
            "pyarrow": pa.__version__.split(".")[0],
            "files": [[file.location, file.name, file.size_bytes, file.fingerprint] for file in of.snapshot.files],
            "schema": [[column.name, column.type] for column in of.snapshot.columns],
            "read": read | ({"version": version} if (version := format_origin(data)) else {}) | format_versions(data),
            "rules": rules,
            "fitted": of.fitted.digest,
            "code": {target: user.digest for target, user in sorted(of.code.items())},
            **_image_libraries(decodes_images(data, of.snapshot.arrow_schema(), of.transforms)),
            "shard_bytes": job.shard_bytes,
            **({"any_type": True} if data.any_type else {}),
            **({"hashed": True} if data.may_share_rows else {}),
            **({"piece": of.piece} if of.piece else {}),
        }
    )


@functools.cache  # reading a package's metadata takes milliseconds, and there may be thousands of units
def _image_libraries(decodes: bool) -> dict[str, str]:
    """Return the versions of the libraries that decode and resize images. Builds of torch (`+cpu`) resize alike."""
    if not decodes:
        return {"pillow": ""}
    torch = importlib.metadata.version("torch").split("+")[0]
    jpeg = importlib.metadata.version("simplejpeg")
    return {"pillow": PIL.__version__, "simplejpeg": jpeg, "torch": torch, "colors": "of 16 bits"}


def hashes_path(key: str, split: Split) -> str:
    """Return the path of the hashes of a unit's rows of `split`, in row order: uint64, little-endian."""
    return unit_path(key, f"{split}.hashes")


def committed(storage: Storage, key: str) -> UnitRecord | None:
    """Return the unit's record if it is committed and all files have the right size."""
    record = storage.read_record(unit_path(key, UNIT_RECORD), UnitRecord)
    if record is None or record.key != key or incomplete_shards(storage, key, record.shards):
        return None
    sizes = storage.sizes(unit_path(key)) if record.hashed else {}
    whole = all(sizes.get(Path(hashes_path(key, split)).name) == 8 * rows for split, rows in record.hashed_rows().items())
    return record if whole else None


def incomplete_shards(storage: Storage, key: str, shards: Iterable[ShardInfo]) -> list[ShardInfo]:
    """List the unit's shards that are missing or have the wrong size; all shards if the unit is not committed."""
    sizes = storage.sizes(unit_path(key))
    return [shard for shard in shards if UNIT_RECORD not in sizes or sizes.get(Path(shard.path).name) != shard.size_bytes]


def begin_unit(job: UnitJob) -> Callable[[], UnitResult]:
    """Make one unit up to the upload of its last shard. The returned function waits for it and commits. Runs in a worker.

    A unit that another process has committed is kept, unless the job has `again`; uncommitted files are replaced. A unit that
    is killed at any point is not committed, and the next try starts from its beginning. Under `data.invalid: error` all bad
    rows of the unit are counted, and it is not committed.

    Raises:
        DataError: a transform or a column is wrong for any rows, or a file cannot be read.
    """
    if not job.again and (existing := committed(job.storage, job.key)) is not None:
        return lambda: UnitResult(record=existing)
    started = time.monotonic()
    # Delete the record first: from here on the shards are not valid.
    job.storage.delete(unit_path(job.key, UNIT_RECORD))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_scratch(job))
        maker = _UnitMaker(job, folder, stack.enter_context(ThreadPoolExecutor(2, "penstock-shard")))
        for split, rows in job.preparation.rows(maker.profiler.read, hashed=job.preparation.data.may_share_rows):
            maker.add(split, rows)
        if maker.problems and job.preparation.data.invalid == "error":
            return lambda: UnitResult(record=None, problems=tuple(joined(maker.problems)))
        maker.write_rest()
        taken, in_use = time.monotonic() - started, stack.pop_all()

    def commit() -> UnitResult:
        with in_use:
            record = maker.finish(time.monotonic() - taken)
        job.storage.write_json(unit_path(job.key, UNIT_RECORD), record.model_dump(mode="json"))
        if job.storage.is_local:  # their digests are known from writing
            remember_digests({str(job.storage.local_path(shard.path)): shard.digest for shard in record.shards})
        return UnitResult(record=record)

    return commit


class _UnitMaker:
    """Collects prepared rows per split and writes full shards; hashes and uploads them while the next rows are prepared."""

    def __init__(self, job: UnitJob, folder: Path, pool: ThreadPoolExecutor) -> None:
        self._job, self._folder, self._pool = job, folder, pool
        self._file_index = {file.uri: index for index, file in enumerate(job.files)}
        self._splits = job.preparation.data.locations
        self._buffers = {split: ShardBuffer(job.shard_bytes) for split in self._splits}
        self._shards: dict[Split, list[ShardInfo]] = {split: [] for split in self._splits}
        self._written: Counter[Split] = Counter()
        self._finish_upload: Callable[[], None] | None = None
        self._schema: tuple[pa.Schema, str] | None = None
        self._classes: dict[Split, dict[int, ClassCount]] = {split: {} for split in self._splits}
        self._hashes: dict[Split, list[np.ndarray]] = {split: [] for split in self._splits}
        self._filtered = Counter[str]()
        self._unseen: Counter[str] = Counter()
        self.profiler = Profiler({file.uri: (file.location, file.name) for file in job.files})
        self.problems: list[RowProblem] = []

    def add(self, split: Split, rows: Rows) -> None:
        """Add one prepared batch."""
        self.problems += rows.problems
        self._filtered.update(rows.filtered)
        self._unseen.update(rows.unseen)
        table = rows.table
        if not table.num_rows or (self.problems and self._job.preparation.data.invalid == "error"):
            return
        self._check_schema(table.schema, rows.origin.place(0))
        self._count_classes(split, rows)
        if rows.origin.hashes is not None:
            self._hashes[split].append(rows.origin.hashes)
        indices = np.array([self._file_index[name] for name in rows.origin.names], np.int32)
        for tables in self._buffers[split].add(with_provenance(table, indices[rows.origin.files], rows.origin.rows)):
            self._write(split, tables)

    def write_rest(self) -> None:
        """Write the last, shorter shards."""
        for split in self._splits:
            for tables in self._buffers[split].finish():
                self._write(split, tables)

    def finish(self, started: float) -> UnitRecord:
        """Wait for the last upload, and describe the unit."""
        self._wait_for_upload()
        for split, hashes in self._hashes.items():
            if hashes:
                path = hashes_path(self._job.key, split)
                local = self._folder / Path(path).name
                np.concatenate(hashes).astype("<u8").tofile(local)
                self._job.storage.put_file(local, path)
        dropped: Counter[str] = Counter()
        for problem in self.problems:
            dropped[problem.kind] += problem.rows
        dropped.update({f"left out by {name}": count for name, count in self._filtered.items() if count})
        return UnitRecord(
            key=self._job.key,
            files=tuple(file.name for file in self._job.files),
            shards=tuple(shard for split in self._splits for shard in self._shards[split]),
            columns=columns_of(self._schema[0]) if self._schema else (),
            rows_read=self._job.rows,
            dropped=dict(dropped),
            first_dropped={problem.kind: problem.place for problem in reversed(self.problems)},
            unseen=dict(self._unseen),
            classes={
                split: tuple(counts[label] for label in sorted(counts)) for split, counts in self._classes.items() if counts
            },
            hashed=self._job.preparation.data.may_share_rows,
            profile=self.profiler.profile(),
            seconds=round(time.monotonic() - started, 3),
        )

    def _write(self, split: Split, tables: list[pa.Table]) -> None:
        path = shard_path(self._job.key, split, self._written[split])
        self._written[split] += 1
        local = self._folder / Path(path).name
        rows = write_shard(local, tables)
        self._wait_for_upload()
        size_bytes = local.stat().st_size
        handle = open(local, "rb")  # noqa: SIM115 - the thread that reads it closes it; the upload may move the file
        digest = self._pool.submit(_digest_and_close, handle)
        upload = self._pool.submit(self._job.storage.put_file, local, path)

        def finish_upload() -> None:
            upload.result()
            local.unlink(missing_ok=True)
            self._shards[split].append(
                ShardInfo(path=path, split=split, rows=rows, size_bytes=size_bytes, digest=digest.result(), unit=self._job.key)
            )

        self._finish_upload = finish_upload

    def _wait_for_upload(self) -> None:
        """Wait for the previous shard: one at a time is on disk and not uploaded."""
        if self._finish_upload is not None:
            finish_upload, self._finish_upload = self._finish_upload, None
            finish_upload()

    def _check_schema(self, schema: pa.Schema, place: str) -> None:
        if self._schema is None:
            self._schema = schema, place
            return
        differing = schema_difference(columns_of(self._schema[0]), columns_of(schema))
        if differing:
            raise DataError(
                f"{differing[0]} at {self._schema[1]}, and {differing[1]} at {place}; a column has one shape in all rows",
                next_step="make the map_batches function return the same columns, dtypes and shapes for every batch (astype), "
                "or fill nulls before it (imputer): numbers with nulls come as float64",
            )

    def _count_classes(self, split: Split, rows: Rows) -> None:
        label = self._job.preparation.data.label
        if label is None or rows.table.schema.field(label).type != pa.int64():
            self.profiler.prepared(split, rows.origin, None)
            return
        values, seen = rows.column(label).to_numpy(), self._classes[split]
        self.profiler.prepared(split, rows.origin, values)
        counts = np.bincount(values)  # labels are below MAX_CLASSES
        found = np.flatnonzero(counts).tolist()
        if not seen.keys() >= set(found):
            # Sorting takes ten times as long as counting, and is rarely needed: the first rows have most classes.
            for value, row in zip(*(part.tolist() for part in np.unique(values, return_index=True)), strict=True):
                seen.setdefault(value, ClassCount(label=value, rows=0, place=rows.origin.place(row)))
        for value in found:
            seen[value] = seen[value].model_copy(update={"rows": seen[value].rows + int(counts[value])})


def _digest_and_close(handle: IO[bytes]) -> str:
    with handle:
        return file_digest(handle)


def schema_difference(first: tuple[ColumnInfo, ...], second: tuple[ColumnInfo, ...]) -> tuple[str, str] | None:
    """Describe the first difference of two schemas, from each side; None if they are equal."""
    if first == second:
        return None
    names = [column.name for column in first]
    others = [column.name for column in second]
    if names != others:
        return f"the columns are {', '.join(names)}", f"{', '.join(others)}"
    for one, two in zip(first, second, strict=True):
        if one != two:
            return f"column {one.name!r} is {one.type_text}", two.type_text
    return None


@contextlib.contextmanager
def _scratch(job: UnitJob) -> Iterator[Path]:
    """Make a private folder for unfinished shards: in the unit's folder if that is local, so that a rename moves them."""
    own = ProcessIdentity.current()
    prefix = f".build-{digest_of([own.host, own.machine])[:12]}-"  # a host name may be that of another container, too
    if not job.storage.is_local:
        with tempfile.TemporaryDirectory(prefix="penstock-unit-") as name:
            yield Path(name)
        return
    home = job.storage.local_path(unit_path(job.key))
    home.mkdir(parents=True, exist_ok=True)
    for stale in home.glob(f"{prefix}*"):
        if not psutil.pid_exists(int(stale.name.removeprefix(prefix).split("-")[0])):
            shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{own.pid}-", dir=home))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
