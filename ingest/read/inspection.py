"""Which columns, types and rows do the files of a source have? Every file is inspected once, by Ray if there is much to read.

A large file is looked through in parts. Where the parts do not suffice, because of types that disagree or of a quote
that reaches over a cut, the file is looked through as a whole, and that is what counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from penstock.errors import DataError, PenstockError
from penstock.ingest.files.listing import Cut, SourceFile
from penstock.ingest.files.unchanged import unchanged
from penstock.ingest.formats.reader import FileFacts, PartFacts, Reader
from penstock.ingest.formats.registry import format_of, reader_of
from penstock.ingest.ray_tasks import ParallelMap
from penstock.ingest.read.parsed_rows import keep_parsed
from penstock.ingest.spec import DataSpec
from penstock.messages import describe_error
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
"""Of a file of twice as much or more that can be cut."""

MUCH_BYTES = 256 << 20
"""What one machine's threads read before a cluster would have begun."""

_REMOTE_THREADS = 16

_TASK_FILES = 256

_THREAD_FILES = 32
"""At most what a thread takes at a time: a small file costs less than handing it over."""

_QUEUED = 4096


Piece = tuple[int, int]
"""The first row, and the end."""


@dataclass(frozen=True)
class _Task:
    """Some files, or a part of one, that are inspected together."""

    files: tuple[tuple[int, SourceFile], ...]
    """Each with its number."""
    span: tuple[int, int] | None = None

    @property
    def num_bytes(self) -> int:
        return self.span[1] - self.span[0] if self.span else sum(file.size_bytes for _, file in self.files)


_Found = tuple[_Task, list[FileFacts | PenstockError | PartFacts | None]]


def is_much(data: DataSpec, files: Sequence[SourceFile]) -> bool:
    """Whether a cluster inspects the files sooner than this machine."""
    of_files = not format_of(data).is_kept and reader_of(data).inspects_rows
    return of_files and sum(file.size_bytes for file in files) >= MUCH_BYTES


def inspect_files(
    data: DataSpec,
    files: Sequence[SourceFile],
    progress: Progress,
    parallel: ParallelMap | None = None,
    part_bytes: int = PART_BYTES,
    *,
    keep: bool = False,
) -> list[FileFacts | PenstockError]:
    """Look through every file: its facts, or its problem.

    Args:
        parallel: where that is done; None for threads of this process.
        keep: whether rows that are parsed for it are kept on the node, see penstock.ingest.read.parsed_rows.
    """
    reader = reader_of(data)
    spans = _spans(reader, files, part_bytes)
    few = max(1, min(_THREAD_FILES, len(files) // (4 * threads_for(files)))) if files else 1
    tasks = list(_tasks(files, spans, *((part_bytes, _TASK_FILES) if parallel else (part_bytes // 16, few))))
    whole: dict[int, FileFacts | PenstockError] = {}
    parts: dict[int, dict[int, PartFacts | None]] = {}
    done, total = 0, sum(file.size_bytes for file in files)
    for task, found in _run(partial(_inspect_task, data, keep), tasks, files, parallel):
        for (number, _), facts in zip(task.files, found, strict=True):
            if task.span is not None:
                parts.setdefault(number, {})[task.span[0]] = facts  # type: ignore[assignment]
            else:
                whole[number] = facts  # type: ignore[assignment]
        done += task.num_bytes
        progress(done / 1e6, total / 1e6, "MB", f"{len(whole)} of {len(files)} files")
    for number, found_parts in parts.items():
        joined = _joined(reader, files[number], found_parts)
        if joined is not None:
            whole[number] = joined
    again = [_Task(((number, files[number]),)) for number in parts if number not in whole]
    for task, found in _run(partial(_inspect_task, data, keep), again, files, parallel):
        whole[task.files[0][0]] = found[0]  # type: ignore[assignment]
        progress(total / 1e6, total / 1e6, "MB", f"{len(whole)} of {len(files)} files")
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
        starts = reader.part_starts(file, head_bytes) if file.size_bytes >= 2 * head_bytes else []
        part = reader.inspect_part(file, 0, starts[1]) if len(starts) > 1 else None
        return reader.joined(file, [part]) if part is not None else None
    except Exception:  # inspecting the whole file names the problem
        return None


def inspect_file(reader: Reader, file: SourceFile, keep_for: DataSpec | None = None) -> FileFacts | PenstockError:
    """Look through one file; problems are returned, so that one bad file does not hide the others.

    Args:
        keep_for: the pipeline's section if rows that are parsed are kept on the node.
    """
    if file.size_bytes == 0:
        return DataError(f"{file.uri}: empty (zero bytes)", next_step="delete it, or write it again")
    try:
        # Of a file of one row it counts only whether it can be read; asking a store again for each would double the time.
        with (
            keep_parsed(keep_for if reader.hands_on_rows else None, file) as copy,
            unchanged(() if reader.one_row_per_file else (file,)),
        ):
            facts = reader.look_through(file, None, copy.add if copy else None)
            assert isinstance(facts, FileFacts)
    except PenstockError as error:
        return error
    except Exception as error:  # whatever a damaged file makes a parser raise
        return DataError(f"{file.uri}: cannot be read: {describe_error(error)}")
    return facts


def pieces_of(data: DataSpec, format: str, file: SourceFile, batch_rows: int, piece_bytes: int = PART_BYTES) -> list[Piece]:
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
    return max(1, min(len(files), _REMOTE_THREADS if remote else (os.cpu_count() or 1)))


def _spans(reader: Reader, files: Sequence[SourceFile], part_bytes: int) -> dict[int, list[tuple[int, int]]]:
    """Return where large files are cut, by their numbers."""
    large = [(number, file) for number, file in enumerate(files) if file.size_bytes >= 2 * part_bytes]
    if reader.one_row_per_file or not large:
        return {}

    def spans(file: SourceFile) -> list[tuple[int, int]]:
        try:
            starts = reader.part_starts(file, part_bytes)
        except Exception:  # looking through it names the problem
            return []
        return list(pairwise([*starts, file.size_bytes])) if len(starts) > 1 else []

    with ThreadPoolExecutor(threads_for(files)) as pool:
        found = pool.map(spans, [file for _, file in large])
        return {number: cut for (number, _), cut in zip(large, found, strict=True) if cut}


def _tasks(
    files: Sequence[SourceFile], spans: dict[int, list[tuple[int, int]]], task_bytes: int, task_files: int
) -> Iterator[_Task]:
    """Yield the work of each task: parts of large files, and small files together."""
    for number, cut in spans.items():
        yield from (_Task(((number, files[number]),), span) for span in cut)
    held: list[tuple[int, SourceFile]] = []
    held_bytes = 0
    for number, file in enumerate(files):
        if number not in spans:
            held.append((number, file))
            held_bytes += file.size_bytes
            if held_bytes >= task_bytes or len(held) >= task_files:
                yield _Task(tuple(held))
                held, held_bytes = [], 0
    if held:
        yield _Task(tuple(held))


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
    if task.span is None:
        return task, [inspect_file(reader, file, data if keep else None) for _, file in task.files]
    file = task.files[0][1]
    try:
        with keep_parsed(data if keep and reader.hands_on_rows else None, file, task.span) as copy, unchanged((file,)):
            part = reader.look_through(file, task.span, copy.add if copy else None)
            assert not isinstance(part, FileFacts)
            if part is None and copy is not None:
                copy.abandon()
        return task, [part]
    except Exception:  # the whole file is looked through then, and its problem reported
        return task, [None]


def _joined(reader: Reader, file: SourceFile, found: dict[int, PartFacts | None]) -> FileFacts | None:
    """Join the facts of a file's parts, and where it can be read from; None if the whole file must be inspected."""
    parts = [part for _, part in sorted(found.items()) if part is not None]
    facts = reader.joined(file, parts) if len(parts) == len(found) else None
    if facts is None:
        return None
    cuts, row, line = list[Cut](), 0, 1
    for begin, part in zip(sorted(found), parts, strict=True):
        cuts.append(Cut(row, begin, line))
        row, line = row + part.rows, line + part.lines
    return facts._replace(cuts=tuple(cuts))
