"""Are the files that were just read the ones that were listed? What is made of them is kept under their fingerprints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.errors import DataError
from penstock.ingest.files.content_digests import content_digests
from penstock.ingest.files.listing import SourceFile, fingerprints_of
from penstock.ingest.files.opening import asking
from penstock.storage import filesystem_of
from penstock.stores import is_local

__all__ = ["unchanged"]

_DIGEST_CHARS = 32
"""A time in ns, the other fingerprint of a local file, has fewer."""


@contextmanager
def unchanged(files: Sequence[SourceFile], each: Callable[..., Iterable[Any]] = map) -> Iterator[None]:
    """Refuse the result of the block of `files`, all of one location, if one of them is not as it was listed. Runs anywhere.

    A local file that was changed and put back within the block is noticed, too: its change time cannot be put back.

    Args:
        each: how a store is asked for many files: `map`, or that of a pool.

    Raises:
        DataError: naming the first file that changed.
        ServiceError: the store does not answer whether they did.
    """
    local = bool(files) and is_local(files[0].uri)
    before = list(map(_state, files)) if local else []
    yield
    still = zip(before, map(_state, files), strict=True) if local else []
    changed = [file for file, (old, new) in zip(files, still, strict=False) if old != new]
    if not changed:
        kept = _as_listed(files) if local else each(_has_fingerprint, files)
        changed = [file for file, same in zip(files, kept, strict=True) if not same]
    if changed:
        raise DataError(
            f"{changed[0].uri}: was replaced or written to after the source was listed; files must not change while a pipeline "
            "reads them",
            next_step="when the program that writes it is done, run the same command again: it takes the file as it is then",
        )


def _state(file: SourceFile) -> tuple[int, ...]:
    try:
        stat = os.stat(_path(file))
    except OSError:
        return ()  # the reader names a file that it cannot open
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _as_listed(files: Sequence[SourceFile]) -> list[bool]:
    """Compare by content where the listing went by it; the digest of an unchanged file is remembered on its machine."""
    try:
        if all(len(file.fingerprint) == _DIGEST_CHARS for file in files):
            return [file.fingerprint == now for file, now in zip(files, content_digests(list(map(_path, files))), strict=True)]
        return [file.fingerprint == str(os.stat(_path(file)).st_mtime_ns) for file in files]
    except OSError:
        return [False] * len(files)


def _path(file: SourceFile) -> str:
    return file.uri.removeprefix("file://")


def _has_fingerprint(file: SourceFile) -> bool:
    fs, path = filesystem_of(file.uri)
    with asking(file.uri):
        return file.fingerprint in fingerprints_of(fs, path, fs.info(path))
