"""Parquet and Arrow: one schema over all files, and damage named by file and row group."""

from __future__ import annotations

import base64
import io
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest
import yaml

from penstock.errors import DataError
from penstock.ingest.columns.type_text import parse_type
from penstock.ingest.formats.registry import reader_of
from tests.ingest.reading import read_rows, read_snapshot, write_files


def refusal(folder: Path, format: str, files: dict[str, str | bytes | pa.Table], **options: Any) -> str:
    write_files(folder, files)
    with pytest.raises(DataError) as caught:
        read_rows(folder, format, **options)
    return str(caught.value)


def write_arrow(path: Path, table: pa.Table) -> None:
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def parquet_bytes(rows: int = 20_000, group_rows: int = 1000) -> bytes:
    buffer = io.BytesIO()
    values = np.random.default_rng(0).integers(0, 1 << 60, rows)
    pq.write_table(pa.table({"a": values}), buffer, row_group_size=group_rows)
    return buffer.getvalue()


def test_types_widen_without_loss_and_layouts_do_not_matter(tmp_path: Path) -> None:
    first = pa.table({"a": pa.array([1], pa.int32()), "b": pa.array(["x"]).dictionary_encode(), "c": pa.nulls(1)})
    second = pa.table({"a": [2.5], "b": pa.array(["y"], pa.large_string()), "c": [3]})
    write_files(tmp_path, {"a.parquet": first, "b.parquet": second})
    assert read_rows(tmp_path, "parquet").to_pydict() == {"a": [1.0, 2.5], "b": ["x", "y"], "c": [None, 3]}


def test_images_as_lists_structs_and_bytes_keep_their_types(tmp_path: Path) -> None:
    pixels = pa.FixedSizeListArray.from_arrays(np.arange(12, dtype=np.uint8), 4)
    table = pa.table({"p": pixels, "i": [{"bytes": b"x", "path": "p"}] * 3, "f": pa.array([b"ab"] * 3, pa.binary(2))})
    write_files(tmp_path, {"a.parquet": table})
    _, snapshot = read_snapshot(tmp_path, "parquet")
    assert [column.type for column in snapshot.columns] == [
        "fixed_size_list<uint8>[4]",
        "struct<bytes: binary, path: string>",
        "fixed_size_binary[2]",
    ]
    assert read_rows(tmp_path, "parquet").to_pylist() == table.to_pylist()


def test_folder_names_give_columns(tmp_path: Path) -> None:
    write_files(tmp_path, {"m=1/a.parquet": pa.table({"a": [1]}), "m=2/a.parquet": pa.table({"a": [2]})})
    assert read_rows(tmp_path, "parquet").to_pydict() == {"a": [1, 2], "m": ["1", "2"]}
    assert read_rows(tmp_path, "parquet", types={"m": "int64"}).to_pydict() == {"a": [1, 2], "m": [1, 2]}
    assert read_rows(tmp_path, "parquet", columns=["a"]).column_names == ["a"]


def test_columns_and_types_that_differ_are_all_named(tmp_path: Path) -> None:
    text = refusal(
        tmp_path,
        "parquet",
        {
            "a.parquet": pa.table({"a": [1], "b": ["x"]}),
            "b.parquet": pa.table({"a": ["1"], "b": ["x"]}),
            "c.parquet": pa.table({"a": [1]}),
        },
    )
    assert "column 'a' is string in b.parquet and int64 in 2 files (a.parquet, c.parquet)" in text
    assert "column 'b' is missing in c.parquet, and there in 2 files (a.parquet, b.parquet)" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty (zero bytes)"),
        (parquet_bytes()[:-500], "damaged, cut off, or not Parquet"),
        ("a,b\n1,2\n", "this is text, not Parquet"),
        (b"\x89PNG\r\n\x1a\n" + b"0" * 99, "this is a PNG image, not Parquet"),
    ],
)
def test_a_broken_parquet_file_is_named(tmp_path: Path, content: bytes | str | pa.Table, message: str) -> None:
    text = refusal(tmp_path, "parquet", {"good.parquet": pa.table({"a": [1]}), "bad.parquet": content})
    assert message in text
    assert str(tmp_path / "bad.parquet") in text


@pytest.mark.parametrize(
    "values",
    [
        pa.array([[1, 2], None, [3]], pa.list_view(pa.int64())),
        pa.array([[1, 2], None, [3]], pa.large_list_view(pa.int64())),
        pa.UnionArray.from_sparse(pa.array([0, 1, 0], pa.int8()), [pa.array([1, 2, 3]), pa.array(["a", "b", "c"])]),
    ],
)
def test_a_type_that_cannot_be_read_is_named_and_may_be_left_out(tmp_path: Path, values: pa.Array) -> None:
    write_arrow(tmp_path / "a.arrow", pa.table({"x": [1, 2, 3], "odd": values}))
    said = refusal(tmp_path, "arrow", {})
    assert f"column 'odd' is {values.type} in a.arrow, a type that cannot be read" in said and "damaged" not in said
    assert said.endswith("or name the other columns in data.columns")
    assert read_rows(tmp_path, "arrow", columns=["x"]).to_pydict() == {"x": [1, 2, 3]}


def test_run_ends_are_read_as_the_values_they_stand_for(tmp_path: Path) -> None:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array([1.5, None]))
    write_arrow(tmp_path / "a.arrow", pa.table({"x": runs}))
    assert read_rows(tmp_path, "arrow").to_pydict() == {"x": [1.5, 1.5, None]}


def test_a_null_in_a_fixed_size_list_of_parquet_is_no_damage(tmp_path: Path) -> None:
    table = pa.table({"v": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))})
    said = refusal(tmp_path, "parquet", {"a.parquet": table})
    assert "row group 0 (rows 0 to 2): a column of fixed-size lists has a null row" in said and "damaged" not in said


def test_times_kept_as_int96_do_not_wrap(tmp_path: Path) -> None:
    times = [datetime(9999, 12, 31), datetime(2020, 1, 1, 0, 0, 0, 123456), datetime(1, 1, 1)]
    table = pa.table({"until": pa.array(times, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    read = read_rows(tmp_path, "parquet").column("until")
    assert read.to_pylist() == times and read.type == pa.timestamp("us"), "as docs/formats.md says"


def test_damaged_page_is_named_by_its_row_groups(tmp_path: Path) -> None:
    content = bytearray(parquet_bytes())
    start = pq.ParquetFile(io.BytesIO(bytes(content))).metadata.row_group(7).column(0).data_page_offset
    content[start : start + 40] = b"\xff" * 40
    text = refusal(tmp_path, "parquet", {"a.parquet": bytes(content)})
    assert re.search(r"a\.parquet: row groups? .*\(rows \d+ to \d+\) cannot be read", text)


def test_a_number_that_does_not_fit_the_common_type_is_named_by_row(tmp_path: Path) -> None:
    text = refusal(tmp_path, "parquet", {"a.parquet": pa.table({"a": [1, 2**60 + 1]}), "b.parquet": pa.table({"a": [1.5]})})
    assert "a.parquet, row 1 (from 0): column 'a' holds 1152921504606846977, which does not read as double" in text


def test_integers_that_no_type_holds_for_certain_are_read_as_the_one_that_the_advice_names(tmp_path: Path) -> None:
    files: dict[str, str | bytes | pa.Table] = {
        "a.parquet": pa.table({"a": pa.array([3], pa.uint64())}),
        "b.parquet": pa.table({"a": pa.array([-1])}),
    }
    said = refusal(tmp_path, "parquet", files)
    assert said.endswith("data.types: {a: int64}")
    assert read_rows(tmp_path, "parquet", types={"a": "int64"})["a"].to_pylist() == [3, -1]


@pytest.mark.parametrize(
    ("kind", "far", "year"), [("timestamp[us]", 2**58, "11103-"), ("timestamp[us]", 2**62, ""), ("date32", 3_000_000, "10183-")]
)
def test_a_time_that_python_has_none_for_is_named(tmp_path: Path, kind: str, far: int, year: str) -> None:
    files: dict[str, str | bytes | pa.Table] = {
        "a.parquet": pa.table({"t": pa.array([0, far], parse_type(kind))}),
        "b.parquet": pa.table({"t": pa.array([0], pa.timestamp("ns"))}),
    }
    assert f"a.parquet, row 1 (from 0): column 't' holds {year}" in refusal(tmp_path, "parquet", files)


@pytest.mark.parametrize(
    ("first", "second", "cure"),
    [
        (pa.array([[1]]), pa.array([["x"]]), "write the files again with one readable type"),
        (pa.array([{"b": 1}]), pa.array([{"b": "x"}]), "write the files again with one readable type"),
        (pa.array([True]), pa.array([0.5]), "data.types: {a: string}"),
        (pa.array([1]), pa.array(["x"]), "data.types: {a: string}"),
    ],
)
def test_what_is_advised_where_types_do_not_fit_can_be_done(
    tmp_path: Path, first: pa.Array, second: pa.Array, cure: str
) -> None:
    said = refusal(tmp_path, "parquet", {"a.parquet": pa.table({"a": first}), "b.parquet": pa.table({"a": second})})
    assert cure in said
    if "types: " in cure:
        types = yaml.safe_load(cure.partition("types: ")[2])
        assert read_rows(tmp_path, "parquet", types=types).num_rows == 2


@pytest.mark.parametrize(
    ("cut", "said"), [("at a batch", "has no end mark"), ("end mark", "has no end mark"), ("none", "bytes lie behind the")]
)
def test_stream_without_its_end_or_with_more_refused(tmp_path: Path, cut: str, said: str) -> None:
    table, sink = pa.table({"a": range(40)}), pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.slice(0, 20))
        half = sink.tell()
        writer.write_table(table.slice(20))
    whole = sink.getvalue().to_pybytes()
    (tmp_path / "a.arrows").write_bytes({"at a batch": whole[:half], "end mark": whole[:-8], "none": whole + whole}[cut])
    with pytest.raises(DataError, match=said):
        read_rows(tmp_path, "arrow")
    (tmp_path / "a.arrows").write_bytes(whole)
    assert read_rows(tmp_path, "arrow").num_rows == 40


def test_arrow_files_and_streams_are_read(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2, 3]})
    with ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    with ipc.new_stream(tmp_path / "b.arrows", table.schema) as writer:
        writer.write_table(table)
    assert read_rows(tmp_path, "arrow").column("a").to_pylist() == [1, 2, 3, 1, 2, 3]


def test_a_truncated_arrow_file_is_named(tmp_path: Path) -> None:
    table = pa.table({"a": list(range(1000))})
    with ipc.new_file(tmp_path / "good.arrow", table.schema) as writer:
        writer.write_table(table)
    content = (tmp_path / "good.arrow").read_bytes()
    text = refusal(tmp_path, "arrow", {"bad.arrow": content[:-200], "other.arrow": parquet_bytes(10)})
    assert f"{tmp_path / 'bad.arrow'}: damaged, cut off" in text
    assert f"{tmp_path / 'other.arrow'}: this is a Parquet file, not Arrow" in text


class _Keys(encryption.KmsClient):  # type: ignore[misc]
    """Wraps nothing."""

    def __init__(self, config: object) -> None:
        super().__init__()

    def wrap_key(self, key: bytes, master: str) -> bytes:
        return base64.b64encode(key)


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_encrypted_parquet_is_named(tmp_path: Path, plaintext_footer: bool) -> None:
    factory = encryption.CryptoFactory(_Keys)
    wanted = encryption.EncryptionConfiguration(footer_key="k", column_keys={"k": ["a"]}, plaintext_footer=plaintext_footer)
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), wanted)
    table = pa.table({"a": range(10), "b": range(10)})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
        writer.write_table(table)
    assert "a.parquet: is encrypted Parquet" in refusal(tmp_path, "parquet", {})
    if plaintext_footer:
        data, snapshot = read_snapshot(tmp_path, "parquet")
        assert len(reader_of(data).pieces(snapshot.files[0], 1)) == 2, "and no column is asked for, which would end the process"


def test_long_texts_of_many_rows_are_read_in_parts(tmp_path: Path) -> None:
    codes = np.arange(1200) * 4 // 1200
    texts, indices = pa.array(["a" * 200_000, "b" * 200_000, "", "short"]), pa.array(codes, pa.int32(), mask=codes == 2)
    table = pa.table({"text": pa.DictionaryArray.from_arrays(indices, texts), "row": np.arange(1200)})
    pq.write_table(table, tmp_path / "a.parquet", store_schema=False)  # 240 MB in 30 kB
    data, snapshot = read_snapshot(tmp_path, "parquet")
    row = 0
    for part in reader_of(data).tables(snapshot.files[0], snapshot.arrow_schema(), 4096):
        assert part.nbytes < 65 << 20
        assert part.column("row").to_pylist() == list(range(row, row + part.num_rows))
        assert [str(text)[:1] for text in part.column("text").to_pylist()] == [
            "abNs"[code] for code in codes[row:][: len(part)]
        ]
        row += part.num_rows
    assert row == 1200
