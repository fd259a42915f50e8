"""Formats with a form of their own give the rows that their libraries have written, and name what is damaged."""

from __future__ import annotations

import datetime
import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable, Mapping
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import orc

from penstock.errors import DataError, PreflightError
from penstock.ingest.preprocess.chain import split_rows
from tests.ingest.preparing import Source
from tests.ingest.reading import read_rows, read_snapshot, write_files

Rows = Mapping[str, list[Any]]

ROWS: Rows = {"x": list(range(100)), "y": [n / 4 for n in range(100)], "name": [f"row {n}" for n in range(100)]}


def as_orc(rows: Rows) -> bytes:
    sink = io.BytesIO()
    orc.write_table(pa.table(dict(rows)), sink, stripe_size=1024)
    return sink.getvalue()


def as_npz(rows: Rows) -> bytes:
    sink = io.BytesIO()
    np.savez(sink, **{name: np.array(values) for name, values in rows.items()})
    return sink.getvalue()


def as_npy(rows: Rows) -> bytes:
    sink = io.BytesIO()
    fields = [("x", "<i8"), ("y", ">f8"), ("name", "U8")]
    np.save(sink, np.array(list(zip(*rows.values(), strict=True)), fields))
    return sink.getvalue()


def as_avro(rows: Rows) -> bytes:
    fastavro = pytest.importorskip("fastavro")
    kinds = {int: "long", float: "double", str: "string"}
    fields = [{"name": name, "type": ["null", kinds[type(values[0])]]} for name, values in rows.items()]
    sink = io.BytesIO()
    records = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    fastavro.writer(sink, {"type": "record", "name": "row", "fields": fields}, records, sync_interval=500)
    return sink.getvalue()


def as_excel(rows: Rows) -> bytes:
    pytest.importorskip("python_calamine")
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for line in ([*rows], *zip(*rows.values(), strict=True)):
        book.active.append(line)
    sink = io.BytesIO()
    book.save(sink)
    return sink.getvalue()


def tar_of(members: Mapping[str, bytes]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return sink.getvalue()


def as_webdataset(rows: Rows) -> bytes:
    lines = zip(*rows.values(), strict=True)
    return tar_of({f"a/{n:04d}.json": json.dumps(dict(zip(rows, line, strict=True))).encode() for n, line in enumerate(lines)})


class Case(NamedTuple):
    name: str
    write: Callable[[Rows], bytes]
    damage: Callable[[bytes], bytes] = lambda content: content[: len(content) * 2 // 3]
    options: Mapping[str, Any] = {}


CASES = {
    "orc": Case("a.orc", as_orc),
    "numpy": Case("a.npz", as_npz),
    "numpy, structured": Case("a.npy", as_npy),
    "avro": Case("a.avro", as_avro),
    "excel": Case("a.xlsx", as_excel),
}


def column_dict(folder: Path, format: str) -> dict[str, list[Any]]:
    return dict(read_rows(folder, format, batch_rows=7).to_pydict())


@pytest.mark.parametrize("case", list(CASES))
def test_the_rows_of_a_library_are_read_in_order_and_a_damaged_file_is_named(tmp_path: Path, case: str) -> None:
    format, (name, write, damage, _) = case.partition(",")[0], CASES[case]
    content = write(ROWS)
    write_files(tmp_path, {f"good/{name}": content, f"bad/{name}": damage(content), f"foreign/{name}": b"%PDF-1.7 no rows"})
    assert column_dict(tmp_path / "good", format) == ROWS
    assert read_rows(tmp_path / "good", format, columns=["y"]).to_pydict() == {"y": ROWS["y"]}
    assert read_rows(tmp_path / "good", format, types={"x": "float64"})["x"].to_pylist() == [float(x) for x in ROWS["x"]]
    for wrong in ("bad", "foreign"):
        with pytest.raises(DataError) as refused:
            read_rows(tmp_path / wrong, format)
        assert str(tmp_path / wrong / name) in str(refused.value), "the file is named"
        assert "Error(" not in str(refused.value)


@pytest.mark.parametrize("case", list(CASES))
def test_an_added_file_moves_no_row(tmp_path: Path, case: str) -> None:
    format, (name, write, *_) = case.partition(",")[0], CASES[case]

    def split() -> dict[int, str]:
        data, snapshot = read_snapshot(tmp_path, format, validation={"fraction": 0.3})
        parts = list(split_rows(data, snapshot, snapshot.files, 4096))
        return {
            x: split for split, table, origin in parts if "b." not in origin.names[0] for x in table["x"].to_pylist() if x < 100
        }

    write_files(tmp_path, {name: write(ROWS)})
    before = split()
    write_files(tmp_path, {name.replace("a.", "b."): write({"x": [1000, 1001], "y": [0.5, 1.5], "name": ["new", "rows"]})})
    assert len(before) == 100 and {*before.values()} == {"train", "validation"}
    assert split() == before


def png(value: int) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(np.full((4, 4), value, np.uint8)).save(sink, "PNG")
    return sink.getvalue()


def npy(array: np.ndarray) -> bytes:
    sink = io.BytesIO()
    np.save(sink, array)
    return sink.getvalue()


@pytest.mark.parametrize("compressed", [False, True])
def test_samples_of_webdataset_are_rows_of_all_their_members(tmp_path: Path, compressed: bool) -> None:
    members: dict[str, bytes] = {}
    for n in range(6):
        members[f"shard/{n:03d}.jpg"] = png(n)
        members[f"shard/{n:03d}.seg.png"] = png(n + 10)
        members[f"shard/{n:03d}.cls"] = b"%d\n" % (n % 2)
        members[f"shard/{n:03d}.npy"] = npy(np.arange(n, dtype=np.float32))
        if n != 3:
            members[f"shard/{n:03d}.txt"] = f"é {n}".encode()
            members[f"shard/{n:03d}.json"] = json.dumps({"w": n if n else 0.5, "tags": ["a"]}).encode()
    content = tar_of(members)
    write_files(
        tmp_path, {"train/a.tar.gz" if compressed else "train/a.tar": gzip.compress(content) if compressed else content}
    )
    rows = read_rows(tmp_path, "webdataset", train="train")
    assert rows["key"].to_pylist() == [f"shard/{n:03d}" for n in range(6)]
    assert rows["cls"].to_pylist() == [0, 1, 0, 1, 0, 1]
    assert rows["txt"].to_pylist() == ["é 0", "é 1", "é 2", None, "é 4", "é 5"]
    assert rows["json"][0].as_py() == {"w": 0.5, "tags": ["a"]} and rows["json"][3].as_py() is None
    assert rows["npy"][2].as_py() == [0.0, 1.0]
    assert rows["image"][1].as_py()["bytes"] == png(1)
    steps = [{"drop": ["txt", "json"]}, {"ragged": {"columns": ["npy"]}}, {"decode_image": {"column": "seg", "mode": "mask"}}]
    source = Source.of(tmp_path, {}, steps, format="webdataset", train="train", label="cls", images={"mode": "L"})
    made = [str(column) for column in source.materialize().feed_schema.columns]
    assert made == ["image: uint8[4, 4, 1]", "seg: uint8[4, 4]", "cls: int64", "npy: float32[*]"]


def test_a_damaged_archive_and_sample_of_webdataset_are_named(tmp_path: Path) -> None:
    content = as_webdataset(ROWS)
    refusals = {
        "cut": (content[: 512 * 21 + 100], "damaged, cut off, or not a tar archive"),
        "page": (b"<html>404</html>" * 100, "this is an HTML page"),
        "sample": (tar_of({"a.cls": b"cat"}), "a.cls holds b'cat', which is not cls"),
        "twice": (tar_of({"a.cls": b"1", "b.cls": b"2", "b.CLS": b"3"}), "sample 'b' has 'cls' twice"),
    }
    for folder, (wrong, said) in refusals.items():
        write_files(tmp_path, {f"{folder}/a.tar": wrong})
        with pytest.raises(DataError) as refused:
            read_rows(tmp_path / folder, "webdataset")
        assert said in str(refused.value) and str(tmp_path / folder / "a.tar") in str(refused.value)


WHOLE = tar_of({f"{n}.cls": b"%d" % n for n in range(6)})


def of_links(kind: bytes) -> bytes:
    sink = io.BytesIO(WHOLE)
    with tarfile.open(fileobj=sink, mode="a") as archive:
        link = tarfile.TarInfo("6.cls")
        link.type, link.linkname = kind, "0.cls"
        archive.addfile(link)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (WHOLE[:1028] + bytes([WHOLE[1028] ^ 1]) + WHOLE[1029:], "at byte 1024: bad checksum"),
        (WHOLE[:3072] + bytes([WHOLE[3072] ^ 1]) + WHOLE[3073:], "at byte 3072: bad checksum"),
        (WHOLE[: 3 * 1024], "at byte 3072: empty header"),
        (WHOLE[: 3 * 1024 + 100], "at byte 3072: truncated header"),
        (WHOLE + WHOLE, "data behind its end mark"),
        (of_links(tarfile.LNKTYPE), "6.cls is a link to 0.cls"),
        (of_links(tarfile.SYMTYPE), "6.cls is a link to 0.cls"),
    ],
    ids=["second header", "fourth header", "cut between", "cut within", "two archives", "hard link", "symbolic link"],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_archive_that_would_lose_samples_refused(tmp_path: Path, content: bytes, said: str, compressed: bool) -> None:
    write_files(tmp_path, {"a.tar.gz": gzip.compress(content)} if compressed else {"a.tar": content})
    with pytest.raises(DataError, match=said):
        read_rows(tmp_path, "webdataset")


def test_members_left_out_of_columns_are_not_parsed(tmp_path: Path) -> None:
    odd = {0: b'{"a": 1}', 1: b"[]"}
    members = {f"{n}.{end}": content for n in range(2) for end, content in {"cls": b"1", "id": b"n01", "json": odd[n]}.items()}
    write_files(tmp_path, {"a.tar": tar_of(members)})
    assert read_rows(tmp_path, "webdataset", columns=["cls"]).to_pydict() == {"cls": [1, 1]}
    with pytest.raises(DataError, match=r"0\.id holds b'n01', which is not id"):
        read_rows(tmp_path, "webdataset")


def test_equal_samples_with_other_keys_are_duplicates(tmp_path: Path) -> None:
    for split, start in (("train", 0), ("test", 100)):
        write_files(tmp_path, {f"{split}/a.tar": tar_of({f"{start + n}.txt": b"%d" % n for n in range(5)})})
    source = Source.of(
        tmp_path, {}, [{"cast": {"txt": "int64"}}], format="webdataset", train="train", test="test", duplicates="refuse"
    )
    with pytest.raises(DataError, match="5 rows"):
        source.materialize()


def test_two_arrays_in_one_npy_refused(tmp_path: Path) -> None:
    with open(tmp_path / "a.npy", "wb") as sink:
        np.save(sink, np.arange(3.0))
        np.save(sink, np.arange(4.0))
    with pytest.raises(DataError, match=r"a\.npy: data lie behind an array"):
        read_rows(tmp_path, "numpy")


@pytest.mark.parametrize(("name", "content"), [("a.json", b'{"a": 1, "a": 2}'), ("a.cls", b"1_0")])
def test_members_are_read_as_strictly_as_files(tmp_path: Path, name: str, content: bytes) -> None:
    write_files(tmp_path, {"a.tar": tar_of({name: content})})
    with pytest.raises(DataError, match=rf"a\.tar: {name} holds "):
        read_rows(tmp_path, "webdataset")


def test_arrays_of_other_length_may_be_left_out(tmp_path: Path) -> None:
    sink = io.BytesIO()
    np.savez(sink, x=np.arange(4.0), y=np.arange(4), x_test=np.arange(2.0))
    write_files(tmp_path, {"a.npz": sink.getvalue()})
    assert read_rows(tmp_path, "numpy", columns=["x", "y"]).to_pydict() == {"x": [0, 1, 2, 3], "y": [0, 1, 2, 3]}
    with pytest.raises(DataError, match="differ in their first axis") as refused:
        read_rows(tmp_path, "numpy")
    assert "data.columns" in refused.value.next_step


def test_arrays_are_tensors_and_what_would_be_unpickled_is_refused(tmp_path: Path) -> None:
    images = np.arange(10 * 2 * 3, dtype=np.uint8).reshape(10, 2, 3)
    write_files(
        tmp_path, {"a/x.npy": npy(images), "b/x.npy": npy(np.array([{}, {}], object)), "c/x.npy": npy(images.T.copy().T)}
    )
    table = read_rows(tmp_path / "a", "numpy", batch_rows=3)
    assert np.array_equal(np.concatenate([chunk.to_numpy_ndarray() for chunk in table["x"].chunks]), images)
    with pytest.raises(DataError, match="Python objects, which are not unpickled"):
        read_rows(tmp_path / "b", "numpy")
    with pytest.raises(DataError, match="Fortran's order"):
        read_rows(tmp_path / "c", "numpy")
    sink = io.BytesIO()
    np.savez(sink, x=np.arange(3), y=np.arange(4))
    write_files(tmp_path, {"d/x.npz": sink.getvalue()})
    with pytest.raises(DataError, match=r"differ in their first axis, the rows: \{'x': 3, 'y': 4\}"):
        read_rows(tmp_path / "d", "numpy")


@pytest.mark.parametrize("values", [np.array([1, 2], "datetime64[h]"), np.zeros((2, 3), np.longdouble), np.zeros((2, 0))])
def test_array_of_unread_dtype_is_not_called_damaged(tmp_path: Path, values: np.ndarray) -> None:
    write_files(tmp_path, {"x.npy": npy(values)})
    with pytest.raises(DataError, match=r"x\.npy: 'x' holds .* a row, which is not read"):
        read_rows(tmp_path, "numpy")


def test_avros_types_become_arrows_and_a_union_of_two_is_refused(tmp_path: Path) -> None:
    fastavro = pytest.importorskip("fastavro")
    day = datetime.date(2020, 1, 2)
    fields: list[tuple[str, Any, Any, pa.DataType]] = [
        ("day", {"type": "int", "logicalType": "date"}, day, pa.date32()),
        ("at", {"type": "long", "logicalType": "timestamp-micros"}, datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC),
         pa.timestamp("us", "UTC")),
        ("price", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, Decimal("1.50"),
         pa.decimal128(9, 2)),
        ("kind", {"type": "enum", "name": "kind", "symbols": ["a", "b"]}, "b", pa.string()),
        ("list", {"type": "array", "items": "float"}, [0.5, 1.5], pa.list_(pa.float32())),
        ("inner", {"type": "record", "name": "inner", "fields": [{"name": "n", "type": ["null", "int"]}]}, {"n": None},
         pa.struct({"n": pa.int32()})),
        ("again", "inner", {"n": 2}, pa.struct({"n": pa.int32()})),
        ("listed", {"type": "array", "items": ["null", "inner"]}, [{"n": 3}, None], pa.list_(pa.struct({"n": pa.int32()}))),
        ("kinds", ["null", "kind"], "a", pa.string()),
    ]  # fmt: skip
    schema = {"type": "record", "name": "row", "fields": [{"name": name, "type": kind} for name, kind, *_ in fields]}
    with open(tmp_path / "a.avro", "wb") as sink:
        fastavro.writer(sink, schema, [{name: value for name, _, value, _ in fields}])
    table = read_rows(tmp_path, "avro")
    assert table.schema.types == [kind for *_, kind in fields]
    assert table.to_pylist() == [{name: value for name, _, value, _ in fields}]
    two = {"type": "record", "name": "row", "fields": [{"name": "u", "type": ["int", "string"]}]}
    with open(tmp_path / "a.avro", "wb") as sink:
        fastavro.writer(sink, two, [{"u": 1}])
    with pytest.raises(DataError, match="column 'u' is a union of 2 types"):
        read_rows(tmp_path, "avro")
    tree = {"type": "record", "name": "tree", "fields": [{"name": "below", "type": ["null", "tree"]}]}
    with open(tmp_path / "a.avro", "wb") as sink:
        fastavro.writer(sink, tree, [{"below": None}])
    with pytest.raises(DataError, match="column 'below' holds records 'tree' that hold others of their kind"):
        read_rows(tmp_path, "avro")


def test_avro_of_a_codec_or_time_that_is_not_read_is_named(tmp_path: Path) -> None:
    fastavro = pytest.importorskip("fastavro")
    schema = {"type": "record", "name": "row", "fields": [{"name": "n", "type": "long"}]}
    sink = io.BytesIO()
    fastavro.writer(sink, schema, [{"n": 1}], codec="null")
    write_files(tmp_path, {"a.avro": sink.getvalue().replace(b"\x08null", b"\x0csnappy")})
    if find_spec("cramjam") is None:
        with pytest.raises(PreflightError, match=r"a\.avro: snappy codec is supported") as refused:
            read_rows(tmp_path, "avro")
        assert "penstock[avro]" in refused.value.next_step
    schema["fields"] = [{"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}}]
    sink = io.BytesIO()
    fastavro.writer(sink, schema, [{"at": 10**18}])
    write_files(tmp_path, {"a.avro": sink.getvalue()})
    with pytest.raises(DataError, match=r"a\.avro: holds a time before the year 1 or after 9999"):
        read_rows(tmp_path, "avro")


def test_cells_of_a_sheet_have_one_kind_a_column(tmp_path: Path) -> None:
    pytest.importorskip("python_calamine")
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.append(["not", "this", "sheet"])
    sheet = book.create_sheet("rows")
    day = datetime.datetime(2020, 1, 2, 3, 4, 5)
    for line in (["written by hand"], ["n", "x", "at", "ok", "mixed"], [1, 0.5, day, True, 1], [None, 2, day, False, "A7"]):
        sheet.append(line)
    book.save(tmp_path / "a.xlsx")
    options = {"excel": {"sheet": "rows", "skip_rows": 1}}
    with pytest.raises(DataError, match=r"column 'mixed' holds 1.* in row 0 \(from 0\), and in row 1 'A7'") as refused:
        read_rows(tmp_path, "excel", **options)
    assert "data.types: {mixed: string}" in refused.value.next_step
    table = read_rows(tmp_path, "excel", types={"mixed": "string"}, **options)
    assert table.schema.types == [pa.int64(), pa.float64(), pa.timestamp("us"), pa.bool_(), pa.string()]
    assert table.to_pylist() == [
        {"n": 1, "x": 0.5, "at": day, "ok": True, "mixed": "1"},
        {"n": None, "x": 2.0, "at": day, "ok": False, "mixed": "A7"},
    ]
    with pytest.raises(DataError, match="there is no sheet 'row'; it has Sheet, rows"):
        read_rows(tmp_path, "excel", excel={"sheet": "row"})


def sheet_of(folder: Path, *lines: list[Any]) -> None:
    pytest.importorskip("python_calamine")
    book = pytest.importorskip("openpyxl").Workbook()
    for line in lines:
        book.active.append(line)
    book.save(folder / "a.xlsx")


def test_days_of_a_sheet_are_midnights(tmp_path: Path) -> None:
    noon = datetime.datetime(2024, 2, 1, 12)
    sheet_of(tmp_path, ["day", "at", 2019], [datetime.date(2024, 1, 31), datetime.date(2024, 1, 31), 1], [None, noon, 2])
    midnight = datetime.datetime(2024, 1, 31)
    assert read_rows(tmp_path, "excel").to_pydict() == {"day": [midnight, None], "at": [midnight, noon], "2019": [1, 2]}
    assert read_rows(tmp_path, "excel", columns=["day"], types={"day": "date32"})["day"].to_pylist() == [midnight.date(), None]
    with pytest.raises(DataError, match=r"row 1 \(from 0\): column 'at' holds .*12, 0.*, which does not read as date32"):
        read_rows(tmp_path, "excel", types={"at": "date32"})


@pytest.mark.parametrize("number", [2**53 + 1, 12345678901234567])
def test_integers_that_a_sheet_rounds_are_refused(tmp_path: Path, number: int) -> None:
    sheet_of(tmp_path, ["id"], [1], [number])
    with pytest.raises(DataError, match=r"column 'id' holds \d+ in row 1 \(from 0\): a workbook keeps 15 digits"):
        read_rows(tmp_path, "excel")
    assert read_rows(tmp_path, "excel", types={"id": "float64"})["id"].to_pylist() == [1.0, pytest.approx(number)]
    sheet_of(tmp_path, ["x"], [0.5], [1e17])
    assert read_rows(tmp_path, "excel")["x"].to_pylist() == [0.5, 1e17]


def test_large_wav_that_is_cut_off_is_named(tmp_path: Path) -> None:
    soundfile, content = pytest.importorskip("soundfile"), io.BytesIO()
    soundfile.write(content, np.zeros(2000), 16000, format="RF64", subtype="PCM_16")
    write_files(tmp_path / "whole", {"a.wav": content.getvalue()})
    assert read_rows(tmp_path / "whole", "audio").num_rows == 1
    write_files(tmp_path / "cut", {"a.wav": content.getvalue()[:2000]})
    with pytest.raises(DataError, match=r"a\.wav: cut off, or empty: \d+ bytes are missing"):
        read_rows(tmp_path / "cut", "audio")


def test_sounds_are_rows_of_their_samples(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    rng = np.random.default_rng(0)
    sounds = {f"{kind}/{n}.{end}": rng.integers(-(2**15), 2**15, (400 + n, 2), np.int16)
              for n, (kind, end) in enumerate([("cat", "wav"), ("cat", "flac"), ("dog", "wav")])}  # fmt: skip
    for name, samples in sounds.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        soundfile.write(tmp_path / name, samples, 8000)
    table = read_rows(tmp_path, "audio", label="label")
    assert table["label"].to_pylist() == ["cat", "cat", "dog"] and table["sample_rate"].to_pylist() == [8000] * 3
    names = table["path"].to_pylist()
    for name, samples in zip(names, table["audio"].to_pylist(), strict=True):
        assert np.array_equal(np.array(samples, np.float32) * 2**15, sounds[name].mean(axis=1, dtype=np.float32))
    source = Source.of(
        tmp_path, {}, ["label_encoder", {"ragged": {"columns": ["audio"]}}], format="audio", train=".", label="label"
    )
    assert source.materialize().rows["train"] == 3
    for subtype in ("PCM_16", "PCM_24", "FLOAT"):
        soundfile.write(tmp_path / "dog" / "cut.wav", sounds["cat/0.wav"], 8000, subtype=subtype)
        whole = (tmp_path / "dog" / "cut.wav").read_bytes()
        (tmp_path / "dog" / "cut.wav").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DataError, match=r"cut\.wav: cut off, or empty: \d+ bytes are missing"):
            read_rows(tmp_path, "audio")
    at = whole.index(b"data")  # a recorder that writes to a pipe knows no size
    for size in (0xFFFFFFFF, 0x7FFFFFDB, 0x80000000):
        piped = whole[:at] + b"data" + size.to_bytes(4, "little") + whole[at + 8 :]
        (tmp_path / "dog" / "cut.wav").write_bytes(piped)
        assert len(read_rows(tmp_path, "audio", train="dog/cut.wav")["audio"][0]) == 400
    (tmp_path / "dog" / "cut.wav").unlink()
    write_files(tmp_path, {"dog/page.wav": "<html>404</html>"})
    with pytest.raises(DataError, match=r"page\.wav: this is an HTML page"):
        read_rows(tmp_path, "audio")


def saved_dataset(folder: Path, splits: Mapping[str, pa.Table], files: int = 2) -> None:
    """What `datasets.DatasetDict.save_to_disk` writes."""
    for split, table in splits.items():
        (folder / split).mkdir(parents=True)
        names = [f"data-{n:05d}-of-{files:05d}.arrow" for n in range(files)]
        for n, name in enumerate(names):
            part = table.slice(n * len(table) // files, (n + 1) * len(table) // files - n * len(table) // files)
            with pa.ipc.new_stream(folder / split / name, table.schema) as writer:
                writer.write_table(part)
        (folder / split / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
        (folder / split / "dataset_info.json").write_text("{}")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))


def test_a_dataset_of_hugging_face_is_the_rows_that_its_state_names(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b", "c", "d", "e"], "label": [0, 1, 0, 1, 1]})
    saved_dataset(tmp_path / "saved", {"train": table, "test": table.slice(0, 2)})
    with pa.ipc.new_stream(tmp_path / "saved/train/cache-1.arrow", table.schema) as writer:
        writer.write_table(table)  # what `map` leaves behind
    rows = read_rows(tmp_path, "huggingface", train="saved/train")
    assert rows.equals(table)
    selected = {"_data_files": [{"filename": "data-00000-of-00002.arrow"}], "_indices_data_files": [1]}
    (tmp_path / "saved/train/state.json").write_text(json.dumps(selected))
    with pytest.raises(DataError, match="keeps a selection of its rows apart"):
        read_rows(tmp_path, "huggingface", train="saved/train")
    (tmp_path / "saved/train/state.json").unlink()
    with pytest.raises(DataError, match=r"there is no state\.json"):
        read_rows(tmp_path, "huggingface", train="saved/train")


def test_what_the_library_itself_has_saved_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [Image.fromarray(np.full((4, 4, 3), n, np.uint8)) for n in range(6)], "label": [0, 1] * 3}
    whole = datasets.Dataset.from_dict(rows, features=features)
    whole.select([5, 0, 3]).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    source = Source.of(tmp_path, {}, [], format="huggingface", train="saved", label="label")
    assert read_rows(tmp_path, "huggingface", train="saved")["label"].to_pylist() == [1, 0, 1]
    assert [str(column) for column in source.materialize().feed_schema.columns] == ["image: uint8[4, 4, 3]", "label: int64"]


def as_records(records: list[bytes]) -> bytes:
    crc32c = pytest.importorskip("google_crc32c")

    def masked(data: bytes) -> bytes:
        checksum = crc32c.value(data)
        return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    headers = [struct.pack("<Q", len(record)) for record in records]
    return b"".join(header + masked(header) + record + masked(record) for header, record in zip(headers, records, strict=True))


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


def part(number: int, content: bytes) -> bytes:
    """A field of a protobuf message that is text, bytes, packed numbers or a message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def as_tfrecord(examples: list[dict[str, Any]]) -> bytes:
    """What `tf.io.TFRecordWriter` writes of `tf.train.Example`: numbers packed, as its serializer does."""

    def feature(values: list[Any]) -> bytes:
        if not values:
            return part(2, b"")
        if isinstance(values[0], bytes):
            return part(1, b"".join(part(1, value) for value in values))
        if isinstance(values[0], float):
            return part(2, part(1, struct.pack(f"<{len(values)}f", *values)))
        return part(3, part(1, b"".join(map(varint, values))))

    entries = [
        [part(1, part(1, name.encode()) + part(2, feature(values))) for name, values in example.items()] for example in examples
    ]
    return as_records([part(1, b"".join(each)) for each in entries])


def test_examples_of_tensorflow_are_rows_and_their_checksums_count(tmp_path: Path) -> None:
    examples = [{"x": [-1 * n], "w": [n / 2], "name": [b"row %d" % n], "ids": list(range(n))} for n in range(1, 50)]
    del examples[7]["w"]
    content = as_tfrecord(examples)
    write_files(tmp_path, {"good/a.tfrecord.gz": gzip.compress(content)})
    table = read_rows(tmp_path / "good", "tfrecord", types={"name": "string"})
    assert table["x"].to_pylist() == [-n for n in range(1, 50)]
    assert table["w"].to_pylist() == [None if n == 8 else n / 2 for n in range(1, 50)]
    assert table["name"][4].as_py() == "row 5" and table["ids"][3].as_py() == [0, 1, 2, 3]
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for wrong, said in (
        (bytes(flipped), r"damaged, cut off, or not TFRecord \(record \d+ \(from 0\)"),
        (content[:-3], r"damaged, cut off, or not TFRecord \(record 48 \(from 0\)"),
        (png(1), "this is a PNG image, not TFRecord"),
    ):
        write_files(tmp_path, {"bad/a.tfrecord": wrong})
        with pytest.raises(DataError, match=said):
            read_rows(tmp_path / "bad", "tfrecord")


def test_empty_feature_beside_single_values_is_null(tmp_path: Path) -> None:
    examples = [{"x": [0.5], "y": [1], "never": []}, {"x": [], "y": [2], "never": []}]
    write_files(tmp_path, {"a.tfrecord": as_tfrecord(examples)})
    assert read_rows(tmp_path, "tfrecord").to_pydict() == {"never": [[], []], "x": [0.5, None], "y": [1, 2]}


@pytest.mark.parametrize(("examples", "said"), [([{}, {}], "its rows have no columns"), ([{"": [1]}], "has no name")])
def test_examples_without_features_or_names_refused(tmp_path: Path, examples: list[dict[str, Any]], said: str) -> None:
    content = as_tfrecord(examples)
    write_files(tmp_path, {"a.tfrecord": content if said != "has no name" else nameless(content)})
    with pytest.raises(DataError, match=said):
        read_rows(tmp_path, "tfrecord")


GOOD_LIST = part(2, part(1, struct.pack("<f", 0.5)))
GOOD_ENTRY = part(1, part(1, b"x") + part(2, GOOD_LIST))
UNKNOWN = part(9, b"more")


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (part(1, part(1, part(1, b"\xff") + part(2, GOOD_LIST))), r"the feature name b'\\xff' is not UTF-8"),
        (part(1, part(1, part(1, b"x") + part(2, part(2, b"\x09" + struct.pack("<d", 0.5))))), "its Floats has a field 1"),
        (part(1, part(1, part(1, b"x") + part(2, part(2, b"\x08\x05")))), "its Floats has a field 1"),
        (
            part(1, part(1, part(1, b"x") + part(2, part(2, part(1, struct.pack("<f", 0.5)) + UNKNOWN)))),
            "its Floats has a field 9",
        ),
        (part(1, part(1, part(1, b"x") + part(2, GOOD_LIST + UNKNOWN))), "its Feature has a field 9"),
        (part(1, part(1, part(1, b"x") + part(2, GOOD_LIST) + UNKNOWN)), "its Entry has a field 9"),
        (part(1, GOOD_ENTRY + UNKNOWN), "its Features has a field 9"),
        (part(1, GOOD_ENTRY) + UNKNOWN, "its Example has a field 9"),
    ],
    ids=["name", "doubles", "varint", "in-list", "in-feature", "in-entry", "in-features", "in-example"],
)
def test_malformed_example_refused_with_file_and_record(tmp_path: Path, example: bytes, said: str) -> None:
    write_files(tmp_path, {"a.tfrecord": as_records([part(1, GOOD_ENTRY), example])})
    with pytest.raises(DataError, match=rf"a\.tfrecord: record 1 \(from 0\) is not a tf\.train\.Example: {said}"):
        read_rows(tmp_path, "tfrecord")


def nameless(content: bytes) -> bytes:
    """The same record, whose one entry holds its feature alone."""
    return as_records([content[12:-4].replace(b"\x0a\x00", b"\x18\x00")])
