"""Are rows of text parsed once, though several passes read them? The inspection of a file keeps them, on the node's disk.

A copy is an Arrow file of the rows of a file, in the types that the inspection found. It counts where the
source as a whole has those types: else the text is read again. Copies live as long as the machine is up, until the rows are
prepared; those of a killed run are deleted after a day, or when the node's cache needs the space. A missing copy, or one that
cannot be written, costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pyarrow as pa

from penstock.digest import digest_of
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.formats.reader import rows_between
from penstock.ingest.formats.registry import format_origin, format_versions
from penstock.ingest.spec import DataSpec
from penstock.machine.cache_dir import cache_folder, configured_budget, kept_free
from penstock.machine.process import boot_id

__all__ = ["ParsedCopy", "forget_parsed", "keep_parsed", "parsed_tables"]

FORMAT = 2
"""Raised by one when a reader gives other rows of the same text."""

MAX_ROW_BYTES = 8 << 10
"""Rows that are larger on average are not kept: how many of them are prepared together shows how they were read."""

_KEPT_S = 24 * 3600

_LOOKED_S = 10

_COPIES, _PARTS = "*.arrow", ".*.part"


class ParsedCopy:
    """Takes the rows of a file as they are parsed. See `keep_parsed`."""

    def __init__(self, path: Path, source_bytes: int) -> None:
        self._path, self._source_bytes = path, source_bytes
        self._part: Path | None = None
        self._sink: IO[bytes] | None = None
        self._writer: pa.RecordBatchFileWriter | None = None
        self._schema: pa.Schema | None = None
        self.is_abandoned = False

    def add(self, table: pa.Table | pa.RecordBatch | None) -> None:
        """Keep the next rows of the file; None, or rows of other types than those before: no copy is made."""
        if self.is_abandoned:
            return
        if table is None or table.nbytes > min(MAX_ROW_BYTES * table.num_rows, _room(self._path.parent)):
            self.abandon()
        elif self._schema is None or table.schema.equals(self._schema):
            try:
                self._write(table)
            except (OSError, pa.ArrowException):  # a full disk
                self.abandon()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Delete the copy."""
        self.is_abandoned = True
        self._close()

    def finish(self) -> None:
        """Commit the copy."""
        if self._writer is None or self._part is None or self.is_abandoned:
            self.abandon()
            return
        with contextlib.suppress(OSError, pa.ArrowException):
            self._writer.close()
            if self._sink is not None:
                self._sink.flush()
            os.utime(self._part, ns=(time.time_ns(), _sealed_ns(self._path)))
            os.replace(self._part, self._path)
        self._close()

    def _write(self, table: pa.Table | pa.RecordBatch) -> None:
        if self._writer is None:
            self._schema = table.schema
            # Named like what the node's cache fetches: it counts these bytes as its own, and leaves a locked file alone.
            self._part = self._path.with_name(f".{self._path.stem}.{self._source_bytes}.{uuid.uuid4().hex[:8]}.part")
            self._sink = open(self._part, "wb")  # noqa: SIM115 - closed in `_close`
            fcntl.flock(self._sink, fcntl.LOCK_SH)
            self._writer = pa.ipc.new_file(self._sink, table.schema)
        self._writer.write(table)

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            if self._sink is not None:
                self._sink.close()
            if self._part is not None:
                self._part.unlink(missing_ok=True)


@contextmanager
def keep_parsed(data: DataSpec | None, file: SourceFile) -> Iterator[ParsedCopy | None]:
    """Take what the block parses of `file`; it counts if the block ends without an error.

    None is given where `data` is None, and where the disk is too full: a tenth of the disk stays free, and PENSTOCK_CACHE_BYTES
    is kept.
    """
    copy = None
    with contextlib.suppress(OSError):
        path = None if data is None else _place(data, data.format, file)
        if path is not None and file.size_bytes <= _room(path.parent):
            copy = ParsedCopy(path, file.size_bytes)
    try:
        yield copy
    except BaseException:
        if copy is not None:
            copy.abandon()
        raise
    if copy is not None:
        copy.finish()


def parsed_tables(
    data: DataSpec, format: str, file: SourceFile, schema: pa.Schema, piece: tuple[int, int] | None = None
) -> Iterator[pa.Table] | None:
    """Return the rows of `file` as its reader would give them, from a copy on this node; None if there is none.

    Args:
        format: that of the snapshot.
        schema: columns and types, which the copy must have.
        piece: its first row, and its end.
    """
    copy = _opened(_place(data, format, file))
    if copy is None or any(
        copy.schema.get_field_index(name) < 0 or copy.schema.field(name).type != schema.field(name).type
        for name in schema.names
    ):
        return None
    return rows_between(_tables(copy, schema), 0, *(piece or (0, file.rows or 0)))


def forget_parsed(data: DataSpec, format: str, files: Sequence[SourceFile]) -> None:
    """Delete the copies of `files` on this node: their rows are prepared."""
    with contextlib.suppress(OSError):
        kept = {path.name for path in _folder().iterdir()}
        for file in files if kept else ():
            path = _place(data, format, file)
            if path is not None and path.name in kept:
                path.unlink(missing_ok=True)


def _tables(copy: pa.RecordBatchFileReader, schema: pa.Schema) -> Iterator[pa.Table]:
    for index in range(copy.num_record_batches):
        batch = copy.get_batch(index)
        yield pa.table([batch.column(name) for name in schema.names], schema=schema)


def _opened(path: Path | None) -> pa.RecordBatchFileReader | None:
    try:
        is_whole = path is not None and os.stat(path).st_mtime_ns == _sealed_ns(path)
        return pa.ipc.open_file(pa.memory_map(str(path))) if is_whole else None
    except (OSError, pa.ArrowException):
        return None


def _sealed_ns(path: Path) -> int:
    """Return the time of change that a finished copy gets, by its name; a later write of any program gives it another."""
    return (1 + zlib.crc32(path.stem.encode()) % 10**9) * 10**9


def _folder() -> Path:
    return cache_folder() / "parsed"


def _place(data: DataSpec, format: str, file: SourceFile) -> Path | None:
    """Return the path of a file's copy, named by all that it depends on; None where it may be one from before a power cut."""
    boot = boot_id()
    options = data.model_dump(mode="json", include={"columns", "types", "invalid", format})
    by = [FORMAT, pa.__version__, format_origin(data), format_versions(data), format, options, data.read_columns]
    key = digest_of([by, file.uri, file.size_bytes, file.fingerprint])
    return _folder() / f"{boot[:8]}-{key}.arrow" if boot else None


def _room(folder: Path) -> float:
    """Return the bytes that copies may take, as of some seconds ago: every block of every file needs them."""
    return _room_at(folder, int(time.monotonic() / _LOOKED_S))


@functools.lru_cache(1)
def _room_at(folder: Path, tick: int) -> float:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    boot, now = boot_id()[:8], time.time()
    for path in (*folder.glob(_COPIES), *folder.glob(_PARTS)):
        with contextlib.suppress(OSError):
            if not path.name.lstrip(".").startswith(boot) or now - path.stat().st_ctime > _KEPT_S:
                path.unlink()
    disk, budget = shutil.disk_usage(folder), configured_budget()
    free = disk.free - kept_free(disk.total, disk.free)
    if budget is None:
        return free
    used = 0
    for path in (*folder.parent.glob(f"*/{_COPIES}"), *folder.parent.glob(f"*/{_PARTS}")):
        with contextlib.suppress(OSError):
            used += path.stat().st_size
    return min(free, budget - used)
