"""Images in class folders and plain text: rows as promised, broken files named."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.errors import DataError
from penstock.ingest.formats.registry import reader_of
from penstock.ingest.read.snapshot import iterate_rows
from tests.ingest.preparing import Source
from tests.ingest.reading import read_rows, read_snapshot, write_files


def picture(format: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(buffer, format)
    return buffer.getvalue()


def flipped(content: bytes, from_end: int) -> bytes:
    return content[:-from_end] + bytes([content[-from_end] ^ 1]) + content[len(content) - from_end + 1 :]


def refusal(folder: Path, format: str, files: dict[str, str | bytes], **options: Any) -> str:
    write_files(folder, files)
    with pytest.raises(DataError) as caught:
        read_rows(folder, format, **options)
    return str(caught.value)


def test_a_picture_is_a_row_with_its_folder_as_label(tmp_path: Path) -> None:
    write_files(
        tmp_path, {"cat/a.JPG": picture("JPEG"), "dog/b.png": picture("PNG"), "dog/c.bmp": picture("BMP"), "x.csv": "no"}
    )
    table = read_rows(tmp_path, "images", label="label", batch_rows=2)
    assert table.drop_columns(["image"]).to_pydict() == {
        "label": ["cat", "dog", "dog"],
        "path": ["cat/a.JPG", "dog/b.png", "dog/c.bmp"],
    }
    assert table.column("image")[1].as_py() == picture("PNG")


def test_a_column_that_files_names_tell_is_read_without_opening_them(tmp_path: Path) -> None:
    write_files(tmp_path, {"cat/a.png": picture("PNG"), "dog/b.png": picture("PNG")})
    data, snapshot = read_snapshot(tmp_path, "images")
    columns = tuple(column for column in snapshot.columns if column.name in ("label", "path"))
    for name in ("cat/a.png", "dog/b.png"):
        (tmp_path / name).unlink()
    (batch,) = iterate_rows(data, snapshot.model_copy(update={"columns": columns}), snapshot.files)
    assert batch.table.to_pydict() == {"label": ["cat", "dog"], "path": ["cat/a.png", "dog/b.png"]}
    with pytest.raises(DataError, match=r"a\.png"):
        list(iterate_rows(data, snapshot, snapshot.files))


def test_the_class_is_the_first_folder_below_the_root(tmp_path: Path) -> None:
    write_files(tmp_path, dict.fromkeys(["cat/indoor/1.png", "cat/2.png", "dog/indoor/1.png"], picture("PNG")))
    for train in (".", "*", "*/**", "**/*.png"):
        assert read_rows(tmp_path, "images", label="label", train=train).column("label").to_pylist() == ["cat", "cat", "dog"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.jpg", picture("JPEG")[:-100], "row 0 (from 0): image file is truncated"),
        ("cut.png", picture("PNG")[:-100], "row 0 (from 0): the PNG is damaged or ends early: Truncated File Read"),
        ("endless.png", picture("PNG")[:-12], "row 0 (from 0): the PNG is damaged or ends early: truncated PNG file"),
        ("flipped.png", flipped(picture("PNG"), 13), "row 0 (from 0): the PNG is damaged or ends early: broken PNG file"),
        ("cut.bmp", picture("BMP")[:-50], "row 0 (from 0): image file is truncated"),
        ("page.jpg", b"<html>404</html>", "row 0 (from 0): not a JPEG, PNG, BMP, WebP, TIFF or GIF image"),
        ("empty.png", b"", "empty (zero bytes)"),
    ],
)
def test_a_broken_picture_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    files: dict[str, Any] = {"train/cat/good.jpg": picture("JPEG"), f"train/cat/{name}": content}
    with pytest.raises(DataError) as caught:
        Source.of(tmp_path, files, ["label_encoder"], format="images", label="label").materialize()
    assert message in str(caught.value)
    assert str(tmp_path / "train" / "cat" / name) in str(caught.value)


def test_a_picture_outside_class_folders_is_refused_only_where_the_label_is_wanted(tmp_path: Path) -> None:
    text = refusal(tmp_path, "images", {"cat/a.png": picture("PNG"), "b.png": picture("PNG")}, label="label")
    assert f"{tmp_path / 'b.png'}: is not in a class folder" in text
    assert read_rows(tmp_path, "images").column("label").to_pylist() == [None, "cat"]


def test_lines_are_rows_and_empty_lines_too(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": b"\xef\xbb\xbfone\ntwo\r\n\nfour \xe2\x80\xa8 \x0b same", "b.txt": "five\n"})
    assert read_rows(tmp_path, "text").column("text").to_pylist() == ["one", "two", "", "four \u2028 \x0b same", "five"]


def test_files_and_chunks_are_rows(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": "äbcde\nfghi", "b.txt": "klmno"})
    assert read_rows(tmp_path, "text", text={"rows": "file"}).column("text").to_pylist() == ["äbcde\nfghi", "klmno"]
    rows = read_rows(tmp_path, "text", text={"rows": "chunk", "chunk_chars": 4}).column("text").to_pylist()
    assert rows == ["äbcd", "e\nfg", "klmn"]


def test_chunks_do_not_hang_on_where_blocks_end(tmp_path: Path) -> None:
    content = "".join(f"line {index} é\n" for index in range(400_000))
    write_files(tmp_path, {"a.txt": content})
    rows = read_rows(tmp_path, "text", text={"rows": "chunk", "chunk_chars": 1000}).column("text").to_pylist()
    assert "".join(rows) == content[: len(content) // 1000 * 1000]


def test_chunks_of_a_text_without_line_ends_are_read_a_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.ingest.formats.text._BLOCK_BYTES", 1 << 10)
    content = "aé語𝄞" * 2_000  # characters of one to four bytes, which blocks cut everywhere
    (tmp_path / "a.txt").write_bytes(content.encode())
    data, snapshot = read_snapshot(tmp_path, "text", text={"rows": "chunk", "chunk_chars": 7})
    tables = list(reader_of(data).tables(snapshot.files[0], snapshot.arrow_schema(), 4096))
    assert "".join(text for table in tables for text in table["text"].to_pylist()) == content[: 8_000 // 7 * 7]
    assert max(table.nbytes for table in tables) < 2 << 10


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_line_that_is_too_long_to_hold_is_refused(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.ingest.files.opening._LINE_BYTES", 5 << 20)
    line = b"%s\n" % (b'{"x": "' + b"a" * (4 << 20) + b'"}')
    files = {"a.txt" if format == "text" else "a.json": line * 2}
    assert read_rows(write_files(tmp_path / "short", files), format).num_rows == 2
    files = {name: content + b'{"x": "' + b"a" * (6 << 20) for name, content in files.items()}
    text = refusal(tmp_path / "long", format, files)
    assert f"{tmp_path / 'long' / next(iter(files))}: has a line of more than 5 MB" in text
    assert "write a row a line" in text


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"ok\ncaf\xe9\n", {}, "line 2 is not UTF-8 (byte 0xe9 at offset 6, near 'café')"),
        ("hi".encode("utf-16"), {}, "this is UTF-16 text"),
        (picture("PNG"), {}, "this is a PNG image, not UTF-8 text"),
        ("abc", {"rows": "chunk", "chunk_chars": 4}, "shorter than one chunk of 4 characters"),
        ("", {}, "empty (zero bytes)"),
    ],
)
def test_a_broken_text_is_named(tmp_path: Path, content: str | bytes, options: dict[str, object], message: str) -> None:
    text = refusal(tmp_path, "text", {"a.txt": content}, text=options)
    assert message in text
    assert str(tmp_path / "a.txt") in text
