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
from penstock.ingest.read.inspection import inspect_head
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


def _rows(data: DataSpec, folder: Path, cut_bytes: int, piece: tuple[int, int] | None = None, keep: bool = False) -> Any:
    """The rows, or the error's text; with the places where the file may be cut."""
    with mock.patch("penstock.ingest.formats.reader.CUT_BYTES", cut_bytes):
        try:
            snapshot = read_source(data, listed(data, folder), silent, keep=keep)
            (file,) = snapshot.files
            tables = [batch.table for batch in iterate_rows(data, snapshot, snapshot.files, 3, piece)]
            return snapshot.arrow_schema(), pa.concat_tables(tables).to_pylist() if tables else [], file.cuts
        except PenstockError as error:
            return str(error)


def _same(format: str, name: str, content: bytes, cut_bytes: int, chosen: tuple[int, int]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / name).write_bytes(content)
        data = DataSpec(format=format, train=".")
        with copies_kept(), mock.patch(f"penstock.ingest.formats.{_MODULES[format]}._BLOCK_BYTES", 60):
            whole, cut = _rows(data, folder, _WHOLE_BYTES), _rows(data, folder, cut_bytes)
            assert repr(_rows(data, folder, cut_bytes, keep=True)) == repr(cut)  # NaN is not equal to NaN
            if isinstance(whole, str) or isinstance(cut, str):
                assert cut == whole
                return
            assert repr(cut[:2]) == repr(whole[:2])
            count = len(whole[1])
            first, end = sorted(min(row, count) for row in chosen)
            if cut[2] and end > first:
                for keep in (False, True):
                    assert repr(_rows(data, folder, cut_bytes, (first, end), keep)[1]) == repr(whole[1][first:end])


_CUTS, _CHOSEN = st.integers(4, 60), st.tuples(st.integers(0, 30), st.integers(0, 30))


@settings(max_examples=40, deadline=None)
@given(lines=_CSV_LINES, end=st.sampled_from(["", "\n"]), cut_bytes=_CUTS, chosen=_CHOSEN)
def test_csv(lines: list[str], end: str, cut_bytes: int, chosen: tuple[int, int]) -> None:
    _same("csv", "a.csv", "\n".join(["a,b", *lines]).encode() + end.encode(), cut_bytes, chosen)


@settings(max_examples=30, deadline=None)
@given(lines=_JSON_LINES, cut_bytes=_CUTS, chosen=_CHOSEN)
def test_json_lines(lines: list[str], cut_bytes: int, chosen: tuple[int, int]) -> None:
    _same("json", "a.jsonl", "\n".join(lines).encode(), cut_bytes, chosen)


@settings(max_examples=40, deadline=None)
@given(lines=_TEXT_LINES, cut_bytes=_CUTS, chosen=_CHOSEN)
def test_lines_of_text(lines: list[str], cut_bytes: int, chosen: tuple[int, int]) -> None:
    _same("text", "a.txt", "\n".join(lines).encode(), cut_bytes, chosen)


@pytest.mark.parametrize("text, is_cut", [('"a, ""b"""', True), ('"two\nlines"', False), ('5" pipe', True)])
def test_csv_is_cut_where_each_row_is_a_line(tmp_path: Path, text: str, is_cut: bool) -> None:
    (tmp_path / "a.csv").write_text("\n".join(["n,t", *(f"{row},{text}" for row in range(200))]))
    data = DataSpec(format="csv", train=".")
    with mock.patch("penstock.ingest.formats.csv._BLOCK_BYTES", 100):
        _, rows, cuts = _rows(data, tmp_path, 200)
        assert [row["n"] for row in rows] == [*range(200)]
        assert bool(cuts) is is_cut
        assert _rows(data, tmp_path, 200, (77, 91))[1] == rows[77:91]


@pytest.mark.parametrize("format", ["arrow", "parquet"])
@pytest.mark.parametrize("piece", [(0, 1), (99, 101), (250, 1000), (0, 1000)])
def test_batches_and_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, piece: tuple[int, int]) -> None:
    table = pa.table({"x": range(1000)})
    if format == "parquet":
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    else:
        monkeypatch.setattr("penstock.ingest.formats.arrow.CUT_BYTES", 1600)
        with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table, 100)
    data = DataSpec(format=format, train=".")
    snapshot = read_source(data, listed(data, tmp_path), silent)
    assert len(reader_of(data).pieces(snapshot.files[0], 400)) > 3
    tables = [batch.table for batch in iterate_rows(data, snapshot, snapshot.files, 64, piece)]
    assert pa.concat_tables(tables)["x"].to_pylist() == [*range(*piece)]


def test_a_sample_looks_at_the_beginning_of_a_large_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n" + "1,2\n" * 1000)
    data = DataSpec(format="csv", train=".")
    (file,) = listed(data, tmp_path)
    head = inspect_head(reader_of(data), file, head_bytes=400)
    assert isinstance(head, FileFacts)
    assert 0 < head.rows < 200
    assert head.columns == {"a": pa.int64(), "b": pa.int64()}
