"""Which columns, types and rows do the files of a source have? Each is inspected once, by Ray if there is much to read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

from penstock.errors import DataError, PenstockError
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import STORE_REQUESTS
from penstock.ingest.files.unchanged import unchanged
from penstock.ingest.formats.reader import FileFacts, Reader
from penstock.ingest.formats.registry import format_of, reader_of
from penstock.ingest.ray_tasks import ParallelMap
from penstock.ingest.spec import DataSpec
from penstock.ingest.task_counts import count_rows
from penstock.messages import describe_error
from penstock.plugins import optional
from penstock.progress import Progress
from penstock.stores import is_local

__all__ = [
    "PART_BYTES",
    "Piece",
    "glance",
    "inspect_file",
    "inspect_files",
    "inspect_head",
    "is_much",
    "pieces_of",
    "threads_for",
]

PART_BYTES = 64 << 20
"""What one worker prepares of a file of twice as much or more, if reading may begin within it."""

MUCH_BYTES = 256 << 20
"""What one machine's threads read before a cluster would have begun."""

_TASK_FILES = 256

_THREAD_FILES = 32
"""At most what a thread takes at a time: a small file costs less than handing it over."""

_QUEUED = 4096

Piece = tuple[int, int]
"""The first row, and the end."""

_Task = tuple[tuple[int, SourceFile], ...]
"""Some files, each with its number, that are inspected together."""

_Found = tuple[_Task, list[FileFacts | PenstockError]]


def is_much(data: DataSpec, files: Sequence[SourceFile]) -> bool:
    """Whether a cluster inspects the files sooner than this machine."""
    of_files = not format_of(data).is_kept and reader_of(data).inspects_rows
    return of_files and sum(file.size_bytes for file in files) >= MUCH_BYTES


def inspect_files(
    data: DataSpec, files: Sequence[SourceFile], progress: Progress, parallel: ParallelMap | None = None, *, keep: bool = False
) -> list[FileFacts | PenstockError]:
    """Look through every file: its facts, or its problem.

    Args:
        parallel: where that is done; None for threads of this process.
        keep: whether rows that are parsed for it are kept on the node, where the plug-in `parsed` is there.
    """
    few = max(1, min(_THREAD_FILES, len(files) // (4 * threads_for(files)))) if files else 1
    tasks = list(_tasks(files, *((PART_BYTES, _TASK_FILES) if parallel else (PART_BYTES // 16, few))))
    whole: dict[int, FileFacts | PenstockError] = {}
    done, total = 0, sum(file.size_bytes for file in files)
    for task, found in _run(partial(_inspect_task, data, keep), tasks, files, parallel):
        whole |= {number: facts for (number, _), facts in zip(task, found, strict=True)}
        done += sum(file.size_bytes for _, file in task)
        progress(done / 1e6, total / 1e6, "MB", f"{len(whole)} of {len(files)} files")
    return [whole[number] for number in range(len(files))]


def inspect_head(reader: Reader, file: SourceFile, head_bytes: int = PART_BYTES // 4) -> FileFacts | PenstockError:
    """Look through the beginning of a large file only, where that can be done: `rows` are those of the beginning."""
    return _head(reader, file, head_bytes) or inspect_file(reader, file)


def glance(reader: Reader, file: SourceFile, head_bytes: int = PART_BYTES // 16) -> FileFacts | None:
    """Inspect the beginning of a file; None where more of it would be needed, or it has a problem."""
    head = None if reader.missing_is_null else _head(reader, file, head_bytes)
    if head is None and (file.size_bytes < 2 * head_bytes or not reader.inspects_rows):
        looked = inspect_file(reader, file)
        head = looked if isinstance(looked, FileFacts) else None
    return head


def _head(reader: Reader, file: SourceFile, head_bytes: int) -> FileFacts | None:
    try:
        return reader.inspect_head(file, head_bytes) if file.size_bytes >= 2 * head_bytes else None
    except Exception:  # inspecting the whole file names the problem
        return None


def inspect_file(reader: Reader, file: SourceFile, keep_for: DataSpec | None = None) -> FileFacts | PenstockError:
    """Look through one file; problems are returned, so that one bad file does not hide the others.

    Args:
        keep_for: the pipeline's section if rows that are parsed are kept on the node.
    """
    if file.size_bytes == 0:
        return DataError(f"{file.uri}: empty (zero bytes)", next_step="delete it, or write it again")
    keep = optional("penstock.ingest.read.parsed.rows:keep_parsed") if reader.hands_on_rows else None
    try:
        # Of a file of one row it counts only whether it can be read; asking a store again for each would double the time.
        with (
            nullcontext() if keep is None else keep(keep_for, file) as copy,
            unchanged(() if reader.one_row_per_file else (file,)),
        ):
            found = reader.inspect(file, *([copy.add] if copy else []))
            count_rows(found.rows, file.size_bytes)
            return found
    except PenstockError as error:
        return error
    except Exception as error:  # whatever a damaged file makes a parser raise
        return DataError(f"{file.uri}: cannot be read: {describe_error(error)}")


def pieces_of(data: DataSpec, format: str, file: SourceFile, batch_rows: int, piece_bytes: int) -> list[Piece]:
    """Return pieces of about `piece_bytes` of the file, in order; none if it is read as a whole, as one below twice that is.

    Pieces begin where a batch of the whole file would, so that what is made of the rows does not show where the file was cut:
    transforms see the same rows together, and sums round alike.

    Args:
        format: that of the snapshot.
        batch_rows: how many rows are read at a time.

    Raises:
        DataError, ServiceError: the file cannot be opened.
    """
    reader = reader_of(data, format)
    rows = file.rows or 0
    if reader.one_row_per_file or file.size_bytes < 2 * piece_bytes:
        return []
    begins = {-(-first // batch_rows) * batch_rows for first, _ in reader.pieces(file, piece_bytes)}
    cut = list(pairwise([*sorted(row for row in begins if row < rows), rows]))
    return cut if len(cut) > 1 else []


def threads_for(files: Sequence[SourceFile]) -> int:
    """Return how many threads read `files` at once."""
    remote = any(not is_local(file.uri) for file in files[:1])
    return max(1, min(len(files), STORE_REQUESTS if remote else (os.cpu_count() or 1)))


def _tasks(files: Sequence[SourceFile], task_bytes: int, task_files: int) -> Iterator[_Task]:
    """Yield the files of each task: small files together."""
    held: list[tuple[int, SourceFile]] = []
    held_bytes = 0
    for number, file in enumerate(files):
        held.append((number, file))
        held_bytes += file.size_bytes
        if held_bytes >= task_bytes or len(held) >= task_files:
            yield tuple(held)
            held, held_bytes = [], 0
    if held:
        yield tuple(held)


def _run(
    inspect: Callable[[_Task], _Found], tasks: Sequence[_Task], files: Sequence[SourceFile], parallel: ParallelMap | None
) -> Iterator[_Found]:
    if parallel is not None:
        yield from parallel(inspect, tasks)
        return
    pool = ThreadPoolExecutor(max(1, min(len(tasks), threads_for(files) if len(files) > 1 else os.cpu_count() or 1)))
    try:
        # In parts, because a million images would otherwise wait as a million futures.
        for start in range(0, len(tasks), _QUEUED):
            yield from pool.map(inspect, tasks[start : start + _QUEUED])
    finally:
        pool.shutdown(cancel_futures=True)


def _inspect_task(data: DataSpec, keep: bool, task: _Task) -> _Found:
    """Runs anywhere."""
    reader = reader_of(data)
    return task, [inspect_file(reader, file, data if keep else None) for _, file in task]
