"""SQLite files as the tests of the empty databases look at them and change them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

__all__ = ["MARK", "execute", "marked", "tables_of"]

MARK = "seen"
"""A table that only a marked database, and a copy of it, has."""


def execute(path: Path, statement: str) -> list[tuple[Any, ...]]:
    """Run one statement and close the file again."""
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement).fetchall()


def tables_of(path: Path) -> set[str]:
    """Names of everything in the schema."""
    return {name for (name,) in execute(path, "SELECT name FROM sqlite_master")}


def marked(cache: Path, empty: str) -> Path:
    """The one database kept below `cache`, in which table `empty` must hold nothing, with a mark in it from now on."""
    (kept,) = (cache / "databases").iterdir()
    assert execute(kept, f"SELECT count(*) FROM {empty}") == [(0,)]
    execute(kept, f"CREATE TABLE {MARK} (x)")
    return kept
