"""Has a local file changed? Its content's digest shows it, remembered for as long as size, times and inode stay the same.

A touched or copied file has another time and the same rows; only its content should make a stage run again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.digest import file_digest
from penstock.machine.cache_dir import cache_folder

__all__ = ["DIGESTED_BYTES", "content_digests", "remember_digests"]

DIGESTED_BYTES = 8 << 30
"""The files of a location of more than this in all are known by size and time: reading them would take too long."""

_SETTLED_S = 2.0
"""A file that was written just now may be written again within one tick of its clock; its digest is not remembered."""

_ASKED = 500
"""Digests that are looked up by one query."""

_seen: dict[str, str] = {}
"""What this process has looked up: files are compared with their listing one by one, and opening the table takes 1 ms."""


def content_digests(paths: Sequence[str], known_stats: Sequence[os.stat_result | None] | None = None) -> list[str]:
    """Return the digest of each file's content, read only where it is not remembered.

    Args:
        known_stats: the state of each file a moment ago, which need not be asked for again.
    """
    stats = [stat or os.stat(path) for path, stat in zip(paths, known_stats or itertools.repeat(None), strict=False)]
    keys = list(map(_key, stats))
    known = {key: _seen[key] for key in keys if key in _seen}
    if len(known) == len(set(keys)):
        return [known[key] for key in keys]
    with _memory() as memory, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        known |= _recall(memory, keys)
        missing = [index for index, key in enumerate(keys) if key not in known]
        fresh = dict(zip(missing, pool.map(file_digest, (paths[index] for index in missing)), strict=True))
        settled = time.time_ns() - int(_SETTLED_S * 1e9)
        remembered = {keys[i]: digest for i, digest in fresh.items() if stats[i].st_mtime_ns < settled}
        _remember(memory, remembered)
    _seen.update(known | remembered)
    return [fresh.get(index) or known[key] for index, key in enumerate(keys)]


def remember_digests(digests: Mapping[str, str]) -> None:
    """Keep the digests of files that this process has just written, by their paths: nothing needs to read them for that."""
    known = {}
    for path, digest in digests.items():
        with contextlib.suppress(OSError):
            known[_key(os.stat(path))] = digest
    _seen.update(known)
    with _memory() as memory:
        _remember(memory, known)


def _key(stat: os.stat_result) -> str:
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


@contextlib.contextmanager
def _memory() -> Iterator[sqlite3.Connection | None]:
    """Open the node's table of digests, named after their kind; None where it cannot be kept: it only saves time."""
    connection = None
    with contextlib.suppress(OSError, sqlite3.Error):
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(Path(folder, "source-digests.db"), timeout=10)
        connection.execute("create table if not exists blake3 (key text primary key, digest text not null)")
    try:
        yield connection
    finally:
        if connection is not None:
            connection.close()


def _recall(memory: sqlite3.Connection | None, keys: Sequence[str]) -> dict[str, str]:
    if memory is None:
        return {}
    known: dict[str, str] = {}
    with contextlib.suppress(sqlite3.Error):
        for some in (keys[start : start + _ASKED] for start in range(0, len(keys), _ASKED)):
            marks = ",".join("?" * len(some))
            known.update(memory.execute(f"select key, digest from blake3 where key in ({marks})", some))
    return known


def _remember(memory: sqlite3.Connection | None, digests: dict[str, str]) -> None:
    if memory is None or not digests:
        return
    with contextlib.suppress(sqlite3.Error), memory:
        memory.executemany("insert or replace into blake3 values (?, ?)", digests.items())
