"""A snapshot says what was read; the rows come back in order, in batches, as that schema."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any, NoReturn

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from penstock.errors import DataError, ServiceError, SpecError
from penstock.ingest.files import listing
from penstock.ingest.read.snapshot import SourceSnapshot, iterate_rows, read_source
from penstock.ingest.spec import DataSpec
from tests.ingest.reading import listed, read_rows, read_snapshot, write_files


def source(folder: Path) -> Path:
    for part in range(3):
        table = pa.table({"id": np.arange(part * 1000, part * 1000 + 1000), "x": np.full(1000, part, np.float32)})
        folder.mkdir(exist_ok=True)
        pq.write_table(table, folder / f"part-{part}.parquet", row_group_size=300)
    return folder


def test_a_snapshot_counts_rows_and_survives_json(tmp_path: Path) -> None:
    _, snapshot = read_snapshot(source(tmp_path), "parquet")
    assert snapshot.rows == 3000
    assert [file.rows for file in snapshot.files] == [1000, 1000, 1000]
    again = SourceSnapshot.model_validate_json(snapshot.model_dump_json())
    assert again == snapshot and again.files[0].with_facts(rows=1).rows == 1
    columns = snapshot.model_dump(mode="json")["files"]
    assert {*columns} == {"uri", "name", "location", "size_bytes", "fingerprint", "rows", "cuts", "row_bytes"} & {*columns}
    assert len(columns["name"]) == 3 and SourceSnapshot.model_validate(snapshot.model_dump()) == snapshot
    assert again.digest == snapshot.digest
    assert again.arrow_schema() == pa.schema({"id": pa.int64(), "x": pa.float32()})


def test_the_digest_follows_files_types_and_places_but_not_the_root(tmp_path: Path) -> None:
    source(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    _, moved = read_snapshot(tmp_path / "b", "parquet")
    (tmp_path / "b").rename(tmp_path / "a")
    _, snapshot = read_snapshot(tmp_path / "a", "parquet")
    assert moved.digest == snapshot.digest
    _, typed = read_snapshot(tmp_path / "a", "parquet", types={"id": "string"})
    _, fewer = read_snapshot(tmp_path / "a", "parquet", train="part-[01].parquet")
    _, placed = read_snapshot(tmp_path / "a", "parquet", train="part-[01].parquet", test="part-2.parquet")
    source(tmp_path / "a")
    _, rewritten = read_snapshot(tmp_path / "a", "parquet")
    assert rewritten.digest == snapshot.digest, "the same bytes are the same source, whenever they were written"
    assert len({each.digest for each in (snapshot, typed, fewer, placed)}) == 4


@pytest.mark.parametrize("format", ["audio", "text"])
def test_compressed_files_of_a_row_each_are_read_together_by_what_they_become(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ingest.read.snapshot._GROUP_BYTES", 1 << 20)
    if format == "audio":
        soundfile = pytest.importorskip("soundfile")
        soundfile.write(tmp_path / "0.flac", np.zeros(80 << 10, np.int16), 48_000)  # of 320 kB, in 2
    else:
        (tmp_path / "0.txt.gz").write_bytes(gzip.compress(b"a" * (320 << 10)))
    first = next(tmp_path.iterdir())
    for row in range(1, 5):
        (tmp_path / first.name.replace("0", str(row), 1)).write_bytes(first.read_bytes())
    data, snapshot = read_snapshot(tmp_path, format, **({"text": {"rows": "file"}} if format == "text" else {}))
    batches = [batch.table for batch in iterate_rows(data, snapshot, snapshot.files)]
    assert [table.num_rows for table in batches] == [3, 2]
    assert batches[0].nbytes > 900 << 10


@pytest.mark.parametrize("test", ["copied", "linked"])
def test_a_copy_of_a_train_file_is_no_test(tmp_path: Path, test: str) -> None:
    source(tmp_path / "train")
    (tmp_path / "linked").symlink_to("train")
    write_files(tmp_path, {"copied/b.parquet": (tmp_path / "train/part-1.parquet").read_bytes()})
    with pytest.raises(DataError, match=r"rows it has seen|in two splits") as caught:
        read_snapshot(tmp_path, "parquet", train="train", test=test)
    assert "part-1.parquet" in caught.value.problems[0 if test == "copied" else 1]


def test_files_without_rows_may_be_alike_in_all_splits(tmp_path: Path) -> None:
    empty, full = pa.table({"x": pa.array([], pa.int64())}), pa.table({"x": [1]})
    write_files(tmp_path, {"train/0.parquet": empty, "train/1.parquet": full, "test/0.parquet": empty})
    write_files(tmp_path, {"test/1.parquet": pa.table({"x": [2]})})
    _, snapshot = read_snapshot(tmp_path, "parquet", train="train", test="test")
    assert [file.rows for file in snapshot.files] == [0, 1, 0, 1]


@pytest.mark.parametrize("batch_rows", [1, 7, 300, 512, 4096])
def test_batches_are_in_order_and_within_one_file(tmp_path: Path, batch_rows: int) -> None:
    data, snapshot = read_snapshot(source(tmp_path), "parquet")
    ids: list[int] = []
    for batch in iterate_rows(data, snapshot, snapshot.files, batch_rows):
        part = int(batch.files[0].name.removeprefix("part-").removesuffix(".parquet"))
        found = batch.table.column("id").to_pylist()
        assert found[0] == part * 1000 + batch.first_row
        assert len(found) == min(batch_rows, 1000 - batch.first_row)
        assert all(column.num_chunks == 1 for column in batch.table.columns)
        ids += found
    assert ids == list(range(3000))


def test_some_of_the_files_can_be_read(tmp_path: Path) -> None:
    data, snapshot = read_snapshot(source(tmp_path), "parquet")
    batches = list(iterate_rows(data, snapshot, snapshot.files[1:2]))
    assert [batch.files[0].name for batch in batches] == ["part-1.parquet"]


def test_files_that_are_one_row_are_batched_together_and_still_named(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{index:02}.txt": f"text {index}" for index in range(10)} | {"test/a.txt": "held out"})
    data, snapshot = read_snapshot(tmp_path, "text", train="*.txt", test="test", text={"rows": "file"})
    batches = list(iterate_rows(data, snapshot, snapshot.files, 4))
    assert [batch.table.num_rows for batch in batches] == [4, 4, 2, 1]
    assert [batch.files[0].location for batch in batches] == ["train", "train", "train", "test"]
    assert batches[1].files[2].uri == str(tmp_path / "06.txt")


def test_rows_are_named_by_file_and_index(tmp_path: Path) -> None:
    data, snapshot = read_snapshot(source(tmp_path), "parquet")
    batch = list(iterate_rows(data, snapshot, snapshot.files, 400))[1]
    assert (batch.files[0].uri, batch.first_row) == (str(tmp_path / "part-0.parquet"), 400)


def test_a_file_that_changed_since_the_snapshot_is_refused(tmp_path: Path) -> None:
    data, snapshot = read_snapshot(source(tmp_path), "parquet")
    pq.write_table(pa.table({"id": [1], "x": pa.array([1.0], pa.float32())}), tmp_path / "part-1.parquet")
    with pytest.raises(DataError, match=r"part-1\.parquet: was replaced or written to after the source was listed"):
        list(iterate_rows(data, snapshot, snapshot.files))


@pytest.mark.parametrize("listed_by", ["content", "time"])
def test_a_file_of_as_many_rows_that_is_put_in_place_while_it_is_read_is_refused(
    tmp_path: Path, listed_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if listed_by == "time":
        monkeypatch.setattr(listing, "DIGESTED_BYTES", 0)
    data, snapshot = read_snapshot(source(tmp_path), "parquet")
    batches = iterate_rows(data, snapshot, snapshot.files, 100)
    next(batches)
    (tmp_path / "new").write_bytes((tmp_path / "part-1.parquet").read_bytes())
    (tmp_path / "new").replace(tmp_path / "part-0.parquet")
    with pytest.raises(DataError, match=r"part-0\.parquet: was replaced"):
        list(batches)


def test_a_file_that_is_put_back_before_anybody_looks_is_refused_all_the_same(tmp_path: Path) -> None:
    data, snapshot = read_snapshot(source(tmp_path), "parquet")
    before = (tmp_path / "part-0.parquet").read_bytes()
    batches = iterate_rows(data, snapshot, snapshot.files, 100)
    next(batches)
    (tmp_path / "part-0.parquet").write_bytes((tmp_path / "part-1.parquet").read_bytes())
    (tmp_path / "part-0.parquet").write_bytes(before)
    with pytest.raises(DataError, match=r"part-0\.parquet: was replaced"):
        list(batches)
    assert len(list(iterate_rows(data, snapshot, snapshot.files, 1000))) == 3, "the file is what was listed again"


def test_an_object_that_is_replaced_in_its_store_after_the_listing_is_refused() -> None:
    store = fsspec.filesystem("memory")
    store.pipe("/replaced/a.csv", b"x\n1\n")
    data, snapshot = read_snapshot(Path(), "csv", train="memory://replaced/a.csv")
    assert [batch.table.num_rows for batch in iterate_rows(data, snapshot, snapshot.files)] == [1]
    store.pipe("/replaced/a.csv", b"x\n2\n")
    with pytest.raises(DataError, match=r"memory://.*a\.csv: was replaced"):
        list(iterate_rows(data, snapshot, snapshot.files))


@pytest.mark.parametrize("call", ["open", "info"])
def test_a_store_that_cuts_the_connection_is_no_damaged_file(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*_given: Any, **_named: Any) -> NoReturn:
        raise ConnectionResetError("cut")

    fsspec.filesystem("memory").pipe("/cut/a.csv", b"x\n1\n")
    data, snapshot = read_snapshot(Path(), "csv", train="memory://cut/a.csv")
    monkeypatch.setattr(MemoryFileSystem, call, cut)
    with pytest.raises(ServiceError, match=r"fails for bucket .*cut/a\.csv.*: cut"):
        list(iterate_rows(data, snapshot, snapshot.files))


def test_a_location_of_nothing_but_empty_files_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"train/a.csv": "x\n1\n", "train/b.csv": "x\n", "test/a.csv": "x\n", "test/b.csv": "x\n"})
    assert read_rows(tmp_path, "csv", train="train").to_pydict() == {"x": [1]}
    with pytest.raises(DataError, match=r"the files of data\.test hold no rows"):
        read_rows(tmp_path, "csv", train="train", test="test")


@pytest.mark.parametrize("format", ["parquet", "csv", "json", "arrow"])
def test_columns_that_are_only_in_folders_names_have_a_value_in_every_row(tmp_path: Path, format: str) -> None:
    for label, rows in (("cat", 3), ("dog", 5)):
        table, path = pa.table({"x": range(rows)}), tmp_path / f"label={label}" / f"p.{format}"
        path.parent.mkdir()
        if format == "arrow":
            with ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
        elif format == "json":
            path.write_text("".join(f'{{"x": {x}}}\n' for x in range(rows)))
        else:
            {"parquet": pq.write_table, "csv": arrow_csv.write_csv}[format](table, path)
    found = read_rows(tmp_path, format, batch_rows=2, columns=["label"]).column("label").to_pylist()
    assert found == ["cat"] * 3 + ["dog"] * 5


def test_progress_counts_bytes_and_files(tmp_path: Path) -> None:
    heard: list[tuple[float, float | None, str, str]] = []
    data = DataSpec(format="parquet", train=".")
    files = listed(data, source(tmp_path))
    read_source(data, files, lambda done, total, unit, note="": heard.append((done, total, unit, note)))
    total = sum(file.size_bytes for file in files) / 1e6
    assert [note for *_, note in heard] == ["1 of 3 files", "2 of 3 files", "3 of 3 files"]
    assert heard[-1][:3] == (total, total, "MB")


def test_columns_come_in_the_order_asked_for(tmp_path: Path) -> None:
    assert read_rows(source(tmp_path), "parquet", columns=["x", "id"]).column_names == ["x", "id"]


def test_every_name_that_no_file_has_is_reported_together(tmp_path: Path) -> None:
    options = {"label": "labl", "types": {"z": "int64"}, "columns": ["id", "X"], "test": {"fraction": 0.1, "by": "x"}}
    with pytest.raises(SpecError) as caught:
        read_snapshot(source(tmp_path), "parquet", **options)
    assert caught.value.problems == (
        "data.columns[1]: no file has a column 'X'; did you mean 'x'?",
        "data.types.z: no file has a column 'z'",
        "data.label: no file has a column 'labl'",
    )


def test_a_label_of_integers_in_one_file_and_fractions_in_another_is_asked_about(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.csv": "y\n1\n2\n", "b.csv": "y\n1.0\n2.0\n"})
    with pytest.raises(DataError, match=r"the label 'y' is int64 in a\.csv and double in b\.csv"):
        read_rows(tmp_path, "csv", label="y")
    assert read_rows(tmp_path, "csv", label="y", types={"y": "int64"}).column("y").to_pylist() == [1, 2, 1, 2]
    assert read_rows(tmp_path, "csv").column("y").to_pylist() == [1.0, 2.0, 1.0, 2.0]


def test_a_type_that_is_none_is_a_fault_of_the_pipeline_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"data\.types\.id: 'integer' is not an Arrow type"):
        read_snapshot(source(tmp_path), "parquet", types={"id": "integer"})


@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_batches_of_large_rows_are_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    sizes = [10, 5_000, 90_000, 10, 200_000, 10] * 20
    table = pa.table({"n": range(len(sizes)), "blob": ["x" * size for size in sizes]})
    {"parquet": pq.write_table, "csv": arrow_csv.write_csv}[format](table, tmp_path / f"a.{format}")
    monkeypatch.setattr("penstock.ingest.read.snapshot.BATCH_BYTES", 1 << 20)
    monkeypatch.setattr("penstock.ingest.formats.parquet._BATCH_BYTES", 1 << 20)
    data, snapshot = read_snapshot(tmp_path, format)
    batches = [batch for batch in iterate_rows(data, snapshot, snapshot.files, 64)]
    assert pa.concat_tables([batch.table for batch in batches]).equals(table.cast(batches[0].table.schema))
    assert max(batch.table.nbytes for batch in batches) < 3 << 20
    starts = [batch.first_row for batch in batches]
    assert len(starts) > 4 and 64 in starts  # where a batch begins otherwise
