"""How does a new project get its SQLite databases without waiting for their migrations? It copies this machine's first ones.

Prefect takes 5 s to make an empty database and MLflow 0.7 s, and every empty database of a version is like every other.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from penstock.machine.cache_dir import cache_root

__all__ = ["copy_database", "databases_folder", "keep_database"]


_NO_COPY = (OSError, sqlite3.DatabaseError)
"""None there, or a damaged one; or a home that cannot be written to. No reason to fail."""


def databases_folder() -> Path:
    """Where empty databases are kept to be copied: below PENSTOCK_CACHE_DIR, or in the home folder."""
    return cache_root() / "databases"


def copy_database(name: str, target: Path) -> bool:
    """Make `target` a copy of the empty database kept as `name`; False, and no file, where there is no sound one.

    Args:
        name: of a program and its version, such as `prefect-3.8.8`.
        target: of the new database; its folder exists.
    """
    with contextlib.suppress(*_NO_COPY):
        _copy(databases_folder() / f"{name}.db", target)
        return True
    target.unlink(missing_ok=True)
    return False


def keep_database(name: str, source: Path, before: str = "") -> None:
    """Keep a copy of the empty database `source` for `copy_database`, if that is possible.

    Args:
        name: as in `copy_database`.
        source: the database; nothing writes to it at the moment.
        before: SQL that takes out of the copy what belongs to this one place.
    """
    with contextlib.suppress(*_NO_COPY):
        kept = databases_folder() / f"{name}.db"
        kept.parent.mkdir(parents=True, exist_ok=True)
        _copy(source, kept, before)


def _copy(source: Path, target: Path, change: str = "") -> None:
    """Copy a whole database; the target appears at once. Raises sqlite3.DatabaseError if the source is no sound one."""
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with contextlib.closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as old:
            if old.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError(f"{source} is damaged")
            with contextlib.closing(sqlite3.connect(part)) as new:
                old.backup(new)
                new.executescript(change)
                # Its owner turns to WAL itself, if at all; a copy alone needs no files beside it.
                new.execute("PRAGMA journal_mode=DELETE")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
