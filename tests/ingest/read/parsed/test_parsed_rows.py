"""Text is parsed once: copies that hold the same rows are read, and a missing copy costs nothing but time."""

from __future__ import annotations

import errno
import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pyarrow as pa
import pytest

from penstock.errors import DataError
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.formats.section import spec_class_for
from penstock.ingest.read.parsed import rows as parsed_rows
from penstock.ingest.read.parsed.rows import forget_parsed, parsed_tables
from penstock.ingest.read.snapshot import SourceSnapshot, iterate_rows, read_source
from penstock.ingest.spec import DataSpec
from penstock.progress import silent
from tests.ingest.reading import copies_kept, listed

CSV = "n,x,s,b,t\n" + "".join(f"{row},{row}.5,a{row},true,2020-01-01 00:00:{row % 60:02}\n" for row in range(500))
JSON = "".join(f'{{"n": {row}, "s": "a{row}", "l": [{row}, 1.5]}}\n' for row in range(500))


@pytest.fixture
def copies() -> Iterator[Path]:
    with copies_kept() as folder:
        yield folder


class Read(NamedTuple):
    data: DataSpec
    snapshot: SourceSnapshot

    @property
    def file(self) -> SourceFile:
        return self.snapshot.files[0]

    def copied(self, piece: tuple[int, int] | None = None) -> list[dict[str, Any]] | None:
        """Rows of the first file's copies."""
        tables = parsed_tables(self.data, self.snapshot.format, self.file, self.snapshot.arrow_schema(), piece)
        return None if tables is None else pa.concat_tables(tables).to_pylist()

    def rows(self) -> list[dict[str, Any]]:
        batches = iterate_rows(self.data, self.snapshot, self.snapshot.files)
        return pa.concat_tables([batch.table for batch in batches]).to_pylist()


def read(folder: Path, files: dict[str, str], keep: bool = True, **options: Any) -> Read:
    for name, text in files.items():
        (folder / name).write_text(text)
    section = {"format": "json" if "a.json" in files else "csv", "train": ".", **options}
    data = spec_class_for(section).model_validate(section)
    return Read(data, read_source(data, listed(data, folder), silent, keep=keep))


@pytest.mark.parametrize("name, text", [("a.csv", CSV), ("a.json", JSON)])
def test_rows_are_not_parsed_again(tmp_path: Path, copies: Path, name: str, text: str) -> None:
    plain = read(tmp_path, {name: text}, keep=False)
    assert plain.copied() is None
    parsed = plain.rows()
    found = read(tmp_path, {name: text})
    assert found.copied() == parsed
    assert found.copied((77, 230)) == parsed[77:230]
    with mock.patch("pyarrow.csv.open_csv", side_effect=AssertionError), mock.patch("pyarrow.json.read_json", None):
        assert found.rows() == parsed


@pytest.mark.parametrize(
    "files",
    [
        {"a.csv": "x\n" + "1\n" * 4000 + "2.5\n"},  # in a later block
        {"a.csv": "x,y\n" + ",1\n" * 3000 + "5,1\n" * 3000},
        {"a.csv": "x\n1\n", "b.csv": "x\n2.5\n"},
        {"a.csv": "x\n-0\n", "b.csv": "x\n-0.0\n"},
        {"a.json": '{"x": 1}\n' * 9000 + '{"x": 2.5}\n'},
        {"a.json": '{"x": 1}\n' * 9000 + '{"y": 2.5}\n'},
        {"a.json": '{"x": "2020-01-01"}\n'},
    ],
)
def test_a_copy_of_other_types_than_the_source_has_is_not_read(tmp_path: Path, copies: Path, files: dict[str, str]) -> None:
    with (
        mock.patch("penstock.ingest.formats.csv._BLOCK_BYTES", 64),
        mock.patch("penstock.ingest.formats.json_text._BLOCK_BYTES", 64),
    ):
        plain = read(tmp_path, files, keep=False)
        expected = repr(plain.rows())  # -0.0 == 0
        kept = read(tmp_path, files)
        assert kept.snapshot == plain.snapshot
        assert kept.copied() is None
        assert repr(kept.rows()) == expected


def test_given_types_and_chosen_columns_name_other_copies(tmp_path: Path, copies: Path) -> None:
    rows = read(tmp_path, {"a.csv": CSV}).rows()
    typed = read(tmp_path, {"a.csv": CSV}, keep=False, types={"n": "string"})
    assert typed.copied() is None
    again = read(tmp_path, {"a.csv": CSV}, types={"n": "string"})
    assert again.copied() == [{**row, "n": str(row["n"])} for row in rows]
    assert read(tmp_path, {"a.csv": CSV}, columns=["s"]).copied() == [{"s": row["s"]} for row in rows]


@pytest.mark.parametrize("name, text", [("a.csv", "n,s\n1,a\nx,b\n"), ("a.json", '{"n": 1}\n{"n": "x"}\n')])
def test_a_value_that_does_not_read_is_refused_as_without_copies(tmp_path: Path, copies: Path, name: str, text: str) -> None:
    with pytest.raises(DataError, match="does not read as int64"):
        read(tmp_path, {name: text}, types={"n": "int64"}).rows()
    assert not [*copies.iterdir()]


def test_a_file_that_changed_since_is_refused_though_there_is_a_copy(tmp_path: Path, copies: Path) -> None:
    found = read(tmp_path, {"a.csv": CSV})
    (tmp_path / "a.csv").write_text(CSV.replace("a7", "b7"))
    with pytest.raises(DataError, match="was replaced or written to"):
        found.rows()
    assert read(tmp_path, {}).rows()[7]["s"] == "b7"


def test_a_damaged_copy_and_one_of_before_a_restart_are_not_read(tmp_path: Path, copies: Path) -> None:
    found = read(tmp_path, {"a.csv": CSV})
    rows = found.rows()
    (copy,) = copies.iterdir()
    whole = copy.read_bytes()
    assert found.copied() == rows
    time_of_change = copy.stat().st_mtime_ns
    for damaged in (whole[:-20], whole.replace((499).to_bytes(8, "little"), (498).to_bytes(8, "little"))):
        copy.write_bytes(damaged)
        assert found.copied() is None
        assert found.rows() == rows
    copy.write_bytes(whole)
    os.utime(copy, ns=(0, time_of_change))
    with mock.patch.object(parsed_rows, "boot_id", lambda: "another"):
        assert found.copied() is None
        parsed_rows._room_at.cache_clear()
        assert read(tmp_path, {}).copied() == rows
        assert not copy.exists()


def test_no_copy_where_there_is_no_room_or_no_use(tmp_path: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = read(tmp_path, {"a.csv": CSV}, keep=False).rows()

    def no_copies() -> None:
        parsed_rows._room_at.cache_clear()
        found = read(tmp_path, {})
        assert not copies.exists() or not [*copies.iterdir()]
        assert found.rows() == rows

    with mock.patch.object(parsed_rows, "kept_free", lambda total, free: free):
        no_copies()
    monkeypatch.setenv("PENSTOCK_CACHE_BYTES", "1000")
    no_copies()
    monkeypatch.delenv("PENSTOCK_CACHE_BYTES")
    for error in (OSError(errno.ENOSPC, "no space"), pa.ArrowNotImplementedError("such a type")):
        with mock.patch.object(parsed_rows.ParsedCopy, "_write", side_effect=error):
            no_copies()
    with mock.patch.object(parsed_rows, "MAX_ROW_BYTES", 10):
        no_copies()
    with mock.patch.object(parsed_rows, "boot_id", lambda: ""):
        no_copies()
    copies.rmdir()
    copies.write_text("in the way")
    parsed_rows._room_at.cache_clear()
    assert read(tmp_path, {}).rows() == rows


def test_a_copy_that_grows_beyond_the_room_is_given_up(tmp_path: Path, copies: Path) -> None:
    packed = gzip.compress(("x\n" + "1\n" * 400_000).encode())
    (tmp_path / "a.csv.gz").write_bytes(packed)
    for room, kept in ((1 << 20, 0), (1 << 24, 1)):  # the 3 MB of the rows need some of it, the packed file next to none
        with mock.patch.object(parsed_rows, "_room", lambda folder, room=room: folder.mkdir(exist_ok=True) or room):
            assert read(tmp_path, {}).snapshot.rows == 400_000
        assert len([*copies.iterdir()]) == kept


def test_copies_go_when_the_rows_are_prepared(tmp_path: Path, copies: Path) -> None:
    found = read(tmp_path, {"a.csv": CSV})
    assert [*copies.iterdir()]
    forget_parsed(found.data, found.snapshot.format, found.snapshot.files)
    assert not [*copies.iterdir()]
