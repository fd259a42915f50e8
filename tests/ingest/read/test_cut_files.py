"""A file that is read in pieces, wherever it is cut, gives the rows that it gives when it is read from its beginning."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.ingest.formats.reader import FileFacts
from penstock.ingest.formats.registry import reader_of
from penstock.ingest.read.inspection import inspect_files, inspect_head
from penstock.ingest.read.snapshot import iterate_rows, read_source
from penstock.ingest.spec import DataSpec
from penstock.progress import silent
from tests.ingest.reading import copies_kept, listed

_WHOLE_BYTES = 1 << 30

_MODULES = {"csv": "csv", "json": "json_text", "text": "text"}

_PLAIN = ("1", "2.5", "", "007", "x", "NA", "12345678901234567890", "2020-01-01", "true", "é")
_QUOTED = ('"q"', '"a,b"', '"a\nb"', '"1,2\n3,4"', '"say ""x"""', '""', '"\n"', '"a\r\nb"', '5" pipe', '"open', 'a"b"c')
_CSV_CELLS = st.sampled_from([*_PLAIN, *_QUOTED])
_CSV_LINES = st.lists(st.tuples(_CSV_CELLS, _CSV_CELLS).map(",".join) | st.sampled_from(["", "1,2", "3,4"]), max_size=24)

_JSON_VALUES = st.none() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
_JSON_LINES = st.lists(st.dictionaries(st.sampled_from("ab"), _JSON_VALUES).map(json.dumps) | st.just(" "), max_size=24)

_TEXT_LINES = st.lists(st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=("Cs",)), max_size=9), max_size=24)


def _rows(data: DataSpec, folder: Path, part_bytes: int, piece: tuple[int, int] | None = None, keep: bool = False) -> Any:
    """The rows, or what is said instead; with the parts a file was cut in."""
    try:
        snapshot = read_source(data, listed(data, folder), silent, part_bytes=part_bytes, keep=keep)
        (file,) = snapshot.files
        tables = [batch.table for batch in iterate_rows(data, snapshot, snapshot.files, 3, piece)]
        return snapshot.arrow_schema(), pa.concat_tables(tables).to_pylist() if tables else [], file.cuts
    except PenstockError as error:
        return str(error)


def _same(format: str, name: str, content: bytes, part_bytes: int, chosen: tuple[int, int]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / name).write_bytes(content)
        data = DataSpec(format=format, train=".")
        whole, cut = _rows(data, folder, _WHOLE_BYTES), _rows(data, folder, part_bytes)
        with copies_kept(), mock.patch(f"penstock.ingest.formats.{_MODULES[format]}._BLOCK_BYTES", 60):
            for bytes_of_part in (_WHOLE_BYTES, part_bytes):
                parsed = _rows(data, folder, bytes_of_part)
                assert repr(_rows(data, folder, bytes_of_part, keep=True)) == repr(parsed)  # NaN is no NaN
        if isinstance(whole, str) or isinstance(cut, str):
            assert cut == whole
            return
        assert cut[:2] == whole[:2]
        count = len(whole[1])
        first, end = sorted(min(row, count) for row in chosen)
        if cut[2] and end > first:
            with copies_kept():
                for keep in (False, True):
                    assert _rows(data, folder, part_bytes, (first, end), keep)[1] == whole[1][first:end]


_PARTS, _CHOSEN = st.integers(4, 60), st.tuples(st.integers(0, 30), st.integers(0, 30))


@settings(max_examples=90, deadline=None)
@given(lines=_CSV_LINES, end=st.sampled_from(["", "\n"]), part_bytes=_PARTS, chosen=_CHOSEN)
def test_csv(lines: list[str], end: str, part_bytes: int, chosen: tuple[int, int]) -> None:
    _same("csv", "a.csv", "\n".join(["a,b", *lines]).encode() + end.encode(), part_bytes, chosen)


@settings(max_examples=60, deadline=None)
@given(lines=_JSON_LINES, part_bytes=_PARTS, chosen=_CHOSEN)
def test_json_lines(lines: list[str], part_bytes: int, chosen: tuple[int, int]) -> None:
    _same("json", "a.jsonl", "\n".join(lines).encode(), part_bytes, chosen)


@settings(max_examples=40, deadline=None)
@given(lines=_TEXT_LINES, part_bytes=_PARTS, chosen=_CHOSEN)
def test_lines_of_text(lines: list[str], part_bytes: int, chosen: tuple[int, int]) -> None:
    _same("text", "a.txt", "\n".join(lines).encode(), part_bytes, chosen)


def test_quoted_lines_are_rows_in_whatever_part_they_begin(tmp_path: Path) -> None:
    texts = [f'{row},"one ""{row}"",\nand 1 2\n{row}"' for row in range(200)]
    (tmp_path / "a.csv").write_text("\n".join(["n,t", *texts]))
    data = DataSpec(format="csv", train=".")
    _, rows, cuts = _rows(data, tmp_path, 200)
    assert [row["n"] for row in rows] == [*range(200)]
    assert len(cuts) > 10  # and not only because it was read as a whole
    assert _rows(data, tmp_path, 200, (77, 91))[1] == rows[77:91]


@pytest.mark.parametrize("format", ["arrow", "parquet"])
@pytest.mark.parametrize("piece", [(0, 1), (99, 101), (250, 1000), (0, 1000)])
def test_batches_and_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, piece: tuple[int, int]) -> None:
    table = pa.table({"x": range(1000)})
    if format == "parquet":
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    else:
        monkeypatch.setattr("penstock.ingest.formats.arrow._CUT_BYTES", 1600)
        with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table, 100)
    data = DataSpec(format=format, train=".")
    snapshot = read_source(data, listed(data, tmp_path), silent)
    assert len(reader_of(data).pieces(snapshot.files[0], 400)) > 3
    tables = [batch.table for batch in iterate_rows(data, snapshot, snapshot.files, 64, piece)]
    assert pa.concat_tables(tables)["x"].to_pylist() == [*range(*piece)]


def test_types_that_only_some_parts_have_are_joined_as_the_whole_file_tells_them(tmp_path: Path) -> None:
    lines = ["i,f,d,s,n", *["1,1,2020-01-01,1,"] * 50, *["2,2.5,2020-01-01 10:00:00,x,"] * 50]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    data = DataSpec(format="csv", train=".")
    files = listed(data, tmp_path)
    (whole,), (cut,) = (
        inspect_files(data, files, silent, part_bytes=_WHOLE_BYTES),
        inspect_files(data, files, silent, part_bytes=90),
    )
    assert isinstance(whole, FileFacts) and isinstance(cut, FileFacts)
    assert cut._replace(cuts=()) == whole
    assert not cut.cuts  # `s` is numbers in some parts and text in others, which only the whole tells


def test_a_sample_looks_at_the_beginning_of_a_large_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n" + "1,2\n" * 1000)
    data = DataSpec(format="csv", train=".")
    (file,) = listed(data, tmp_path)
    head = inspect_head(reader_of(data), file, head_bytes=400)
    assert isinstance(head, FileFacts)
    assert 0 < head.rows < 200
    assert head.columns == {"a": pa.int64(), "b": pa.int64()}
