"""How does a new project get its SQLite databases without their migrations? It copies the first ones made on this machine.

The first start of a Prefect server takes 2.3 s of CPU with a copy and 5.4 s without (2026-11-28, two busy cores, three turns).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from penstock.machine.cache_dir import cache_root

__all__ = ["copy_database", "databases_folder", "keep_database"]

_NO_COPY = (OSError, sqlite3.DatabaseError)
"""The copy is missing or damaged, or the folder cannot be written: then the database is made anew."""


def databases_folder() -> Path:
    """Return the folder of the kept databases: below PENSTOCK_CACHE_DIR, or in the home folder."""
    return cache_root() / "databases"


def copy_database(name: str, target: Path) -> bool:
    """Make `target` a copy of the empty database kept as `name`; return False, with an empty file, if there is no sound one.

    Its mode is the umask's: SQLite would make a file that others of the group cannot write, with `-wal` and `-shm` like it.

    Args:
        name: program and version, such as `prefect-3.8.8`.
        target: the new database; its folder exists.
    """
    with contextlib.suppress(*_NO_COPY):
        _copy(databases_folder() / f"{name}.db", target)
        return True
    target.unlink(missing_ok=True)
    target.touch()
    return False


def keep_database(name: str, source: Path, before: str = "") -> None:
    """Keep a copy of the empty database `source` for `copy_database`, if that is possible.

    Args:
        name: as in `copy_database`.
        source: the database; nothing writes to it at the moment.
        before: SQL that removes from the copy the rows that belong to this one place.
    """
    with contextlib.suppress(*_NO_COPY):
        kept = databases_folder() / f"{name}.db"
        kept.parent.mkdir(parents=True, exist_ok=True)
        _copy(source, kept, before)


def _copy(source: Path, target: Path, change: str = "") -> None:
    """Copy a whole database; the target appears at once. Raises sqlite3.DatabaseError if the source is damaged."""
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        part.touch()
        with contextlib.closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as old:
            if old.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError(f"{source} is damaged")
            with contextlib.closing(sqlite3.connect(part)) as new:
                old.backup(new)
                new.executescript(change)
                # Its owner turns on WAL itself; the copy must be one file.
                new.execute("PRAGMA journal_mode=DELETE")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
