"""Are empty databases copied whole or not at all, and is a machine that cannot keep them no worse off?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.machine.empty_database import copy_database, databases_folder, keep_database
from tests.penstock.databases import execute


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database with one row."""
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    return database(tmp_path / "made.db", "7")


def database(path: Path, value: str) -> Path:
    execute(path, "CREATE TABLE t (x)")
    execute(path, f"INSERT INTO t VALUES ({value})")
    return path


def rows(path: Path) -> list[tuple[int]]:
    return execute(path, "SELECT x FROM t")


def test_kept_database_is_copied_without_local_rows(made: Path, tmp_path: Path) -> None:
    assert not copy_database("db-1", tmp_path / "early.db")
    keep_database("db-1", made, before="DELETE FROM t; INSERT INTO t VALUES (8)")
    assert copy_database("db-1", tmp_path / "new.db")
    assert rows(tmp_path / "new.db") == [(8,)] and rows(made) == [(7,)]
    assert not copy_database("db-2", tmp_path / "other-version.db")
    empty = [path.name for path in tmp_path.glob("*.db") if not path.stat().st_size]
    assert sorted(empty) == ["early.db", "other-version.db"], "empty files, which SQLite fills"


def test_damaged_copy_is_not_used_and_is_replaced(made: Path, tmp_path: Path) -> None:
    keep_database("db-1", database(tmp_path / "large.db", "zeroblob(90000)"))
    (kept,) = databases_folder().iterdir()
    kept.write_bytes(kept.read_bytes()[:9000])
    assert not copy_database("db-1", tmp_path / "new.db") and not (tmp_path / "new.db").stat().st_size
    keep_database("db-1", made)
    assert copy_database("db-1", tmp_path / "new.db") and rows(tmp_path / "new.db") == [(7,)]


def test_unwritable_cache_fails_nothing(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(made))  # a file
    keep_database("db-1", made)
    assert not copy_database("db-1", tmp_path / "new.db") and rows(made) == [(7,)]


@pytest.mark.parametrize("configured", ["cache", "~/cache"])
def test_cache_folder_accepts_relative_and_home_paths(monkeypatch: pytest.MonkeyPatch, configured: str) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", configured)
    assert databases_folder() == (Path.home() if configured[0] == "~" else Path.cwd()) / "cache" / "databases"


def test_databases_have_the_mode_of_the_umask(made: Path, tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        assert not copy_database("db-1", tmp_path / "first.db")
        keep_database("db-1", made)
        assert copy_database("db-1", tmp_path / "second.db")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("first.db", "second.db")] == [0o664, 0o664]
