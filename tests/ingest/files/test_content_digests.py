"""A file is what it holds: touching or copying it changes nothing, and changing one byte does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.errors import DataError
from penstock.ingest.files import content_digests as source_digests
from penstock.ingest.files import listing as source
from penstock.ingest.files.content_digests import content_digests
from penstock.ingest.read.snapshot import read_source
from penstock.ingest.spec import DataSpec
from penstock.progress import silent
from tests.ingest.reading import listed


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))


def fingerprints(folder: Path) -> list[str]:
    return [file.fingerprint for file in listed(DataSpec(format="csv", train="rows/"), folder)]


def make_rows(folder: Path) -> Path:
    (folder / "rows").mkdir(parents=True)
    for name in "ab":
        (folder / "rows" / f"{name}.csv").write_text(f"x\n{name}\n")
    return folder


def test_a_touched_or_copied_source_is_the_same_and_a_changed_byte_is_not(tmp_path: Path) -> None:
    folder = make_rows(tmp_path / "one")
    before = fingerprints(folder)
    os.utime(folder / "rows" / "a.csv", (1, 1))
    assert fingerprints(folder) == before
    shutil.copytree(folder / "rows", tmp_path / "two" / "rows")
    assert fingerprints(tmp_path / "two") == before
    (folder / "rows" / "a.csv").write_text("x\nA\n")
    assert fingerprints(folder) != before and fingerprints(folder)[1] == before[1]


def test_a_file_changed_behind_its_time_is_noticed(tmp_path: Path) -> None:
    folder = make_rows(tmp_path / "one")
    path = folder / "rows" / "a.csv"
    os.utime(path, (1000, 1000))
    before = fingerprints(folder)
    with open(path, "r+") as file:
        file.write("y")
    os.utime(path, (1000, 1000))
    assert fingerprints(folder) != before


def test_a_file_that_cannot_be_read_through_is_left_to_the_reader_to_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_rows(tmp_path / "one")

    def gone_meanwhile(paths: Sequence[str], stats: object) -> list[str]:
        os.remove(paths[0])
        return content_digests(paths)

    monkeypatch.setattr(source, "content_digests", gone_meanwhile)
    data = DataSpec(format="csv", train="rows/")
    with pytest.raises(DataError, match=r"rows/a\.csv"):
        read_source(data, listed(data, folder), silent)


def test_a_file_that_has_settled_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, reads = make_rows(tmp_path / "one"), []
    digest = source_digests.file_digest
    monkeypatch.setattr(source_digests, "file_digest", lambda path: (reads.append(path), digest(path))[1])
    settled, fresh = str(folder / "rows" / "a.csv"), str(folder / "rows" / "b.csv")
    os.utime(settled, (1000, 1000))
    assert content_digests([settled, fresh]) == content_digests([settled, fresh])
    assert reads.count(settled) == 1
    assert reads.count(fresh) == 2, "what was written just now may be written again without a new time"


def test_without_a_place_to_remember_files_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "a file" / "cache"))
    folder = make_rows(tmp_path / "one")
    assert fingerprints(folder) == fingerprints(folder)


def test_sources_too_large_to_read_through_go_by_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_rows(tmp_path / "one")
    monkeypatch.setattr(source, "DIGESTED_BYTES", 3)
    before = fingerprints(folder)
    os.utime(folder / "rows" / "a.csv", (1, 1))
    assert fingerprints(folder) != before
