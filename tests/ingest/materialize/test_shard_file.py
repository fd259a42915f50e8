"""Shards: what is written comes back as views into the file, and the same rows give the same bytes."""

from __future__ import annotations

import errno
import re
import resource
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from penstock.digest import file_digest
from penstock.errors import DataError
from penstock.ingest.columns.arrays import columns_of, tensor_array
from penstock.ingest.materialize.shard_file import ShardBuffer, open_shard, with_provenance, write_shard


def make_table(rows: int, start: int = 0) -> pa.Table:
    ids = np.arange(start, start + rows)
    images = (ids[:, None, None] * np.ones((1, 2, 3))).astype(np.uint8)
    table = pa.table({"image": tensor_array(images), "x": pa.array(ids.astype(np.float32)), "label": pa.array(ids % 3)})
    return with_provenance(table, np.zeros(rows), ids)


def test_columns_come_back_with_shape_dtype_and_values(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    assert write_shard(path, [make_table(4), make_table(3, start=4)]) == 7
    shard = open_shard(path)
    assert shard.rows == 7
    assert [(c.name, c.dtype, c.shape) for c in shard.columns] == [
        ("image", "uint8", (2, 3)),
        ("x", "float32", ()),
        ("label", "int64", ()),
    ]
    image = shard.column("image")
    assert image.shape == (7, 2, 3)
    assert image[6].tolist() == [[6] * 3] * 2
    assert shard.column("x").tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert shard.column("_row").dtype == np.int64
    assert shard.column("_file").dtype == np.int32


@pytest.mark.parametrize("column", ["image", "x", "label", "_row"])
def test_column_is_a_read_only_view_of_the_file(tmp_path: Path, column: str) -> None:
    path = tmp_path / "a.arrow"
    write_shard(path, [make_table(500)])
    before = pa.total_allocated_bytes()
    view = open_shard(path).column(column)
    assert pa.total_allocated_bytes() - before < view.nbytes
    assert view.flags.c_contiguous
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0


def test_a_view_outlives_its_reader_and_the_directory_entry(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_shard(path, [make_table(5)])
    view = open_shard(path).column("x")
    path.unlink()
    assert view.tolist() == [0, 1, 2, 3, 4]


def test_bytes_do_not_depend_on_tables(tmp_path: Path) -> None:
    whole, parts, sliced = (tmp_path / name for name in ("whole", "parts", "sliced"))
    write_shard(whole, [make_table(9)])
    write_shard(parts, [make_table(2), make_table(6, start=2), make_table(1, start=8)])
    write_shard(sliced, [make_table(20).slice(0, 9).replace_schema_metadata({"note": "from elsewhere"})])
    assert file_digest(whole) == file_digest(parts) == file_digest(sliced)


def test_bytes_do_not_depend_on_write_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(tmp_path / "whole", [make_table(500)])
    monkeypatch.setattr("penstock.ingest.materialize.shard_file.PIECE_BYTES", 7)
    write_shard(tmp_path / "pieces", [make_table(500)])
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()


def test_full_disk_is_reported_as_such() -> None:
    with pytest.raises(OSError) as caught:
        write_shard("/dev/full", [make_table(10)])
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/dev/full")


def test_short_write_is_continued(tmp_path: Path) -> None:
    write_shard(tmp_path / "whole", [make_table(10)])
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "whole").stat().st_size - 3, hard))
    try:
        with pytest.raises(OSError) as caught:
            write_shard(tmp_path / "cut", [make_table(10)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert caught.value.errno == errno.EFBIG


def test_no_write_is_larger_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def writes() -> int:
        return int(re.search(r"syscw: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]

    monkeypatch.setattr("penstock.ingest.materialize.shard_file.PIECE_BYTES", 1000)
    before = writes()
    write_shard(tmp_path / "a", [make_table(5000)])
    assert writes() - before >= (tmp_path / "a").stat().st_size // 1000 > 100


def test_rows_in_a_slice_keep_their_place(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_shard(path, [make_table(20).slice(7, 3)])
    assert open_shard(path).column("image")[:, 0, 0].tolist() == [7, 8, 9]


def test_shard_boundaries_do_not_depend_on_tables() -> None:
    limit = 5 * (make_table(1).nbytes)  # with provenance, which takes 12 bytes a row
    sizes = []
    for tables in ([make_table(12)], [make_table(1, i) for i in range(12)], [make_table(7), make_table(5, 7)]):
        buffer = ShardBuffer(limit)
        full = [shard for table in tables for shard in buffer.add(table)]
        full += list(buffer.finish())
        sizes.append([sum(t.num_rows for t in shard) for shard in full])
    assert sizes == [[5, 5, 2]] * 3


def test_a_row_larger_than_a_shard_gets_a_shard_of_its_own() -> None:
    buffer = ShardBuffer(1)
    assert len(list(buffer.add(make_table(3)))) == 3
    assert list(buffer.finish()) == []


def test_null_is_refused_when_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nulls"):
        write_shard(tmp_path / "a", [pa.table({"x": pa.array([1.0, None])})])


def test_a_column_of_a_type_without_text_is_refused() -> None:
    with pytest.raises(DataError, match=r"'word'.*union"):
        columns_of(pa.schema([("word", pa.dense_union([pa.field("a", pa.string())]))]))


def test_bytes_of_text_do_not_depend_on_cuts_of_tables(tmp_path: Path) -> None:
    words = pa.array([None if row % 3 == 1 else "ab" * row for row in range(40)])
    table = pa.table({"word": words, "words": pa.array([[word] * (row % 3) for row, word in enumerate(words.to_pylist())])})
    for name, cuts in (("whole", [(3, 30)]), ("cut", [(3, 5), (8, 1), (9, 24)])):
        write_shard(tmp_path / name, [table.slice(*cut) for cut in cuts])
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "cut").read_bytes()
    assert open_shard(tmp_path / "whole").column("word").to_pylist() == words.to_pylist()[3:33]
    sizes = [[len(part) for part in ShardBuffer(200).add(rows)] for rows in (table, table.take(pa.array(range(40))))]
    assert sizes[0] == sizes[1] and len(sizes[0]) > 5


def test_torn_shard_error_has_next_step(tmp_path: Path) -> None:
    path = tmp_path / "torn.arrow"
    write_shard(path, [make_table(100)])
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"torn\.arrow.*") as caught:
        open_shard(path)
    assert "run the pipeline again" in str(caught.value)
    with pytest.raises(DataError, match=r"absent\.arrow"):
        open_shard(tmp_path / "absent.arrow")


def test_unknown_column_error_lists_columns(tmp_path: Path) -> None:
    write_shard(tmp_path / "a", [make_table(1)])
    with pytest.raises(KeyError, match=r"'nope'.*'image'"):
        open_shard(tmp_path / "a").column("nope")


def test_booleans_are_kept_as_bytes() -> None:
    assert tensor_array(np.array([True, False])).to_pylist() == [1, 0]
