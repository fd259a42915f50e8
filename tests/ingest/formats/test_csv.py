"""CSV: types come from all values, and whatever is wrong is named by file and line."""

from __future__ import annotations

import datetime
import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import DataError
from tests.ingest.reading import read_rows, read_snapshot, write_files

NUMBERS = "".join(f"{row},{row / 2}\n" for row in range(100))


def refusal(folder: Path, files: dict[str, str | bytes | pa.Table], **options: Any) -> str:
    write_files(folder, files)
    with pytest.raises(DataError) as caught:
        read_rows(folder, "csv", **options)
    assert caught.value.exit_code == 4
    return str(caught.value)


def test_types_are_inferred_from_every_value(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "a.csv": "zip,code,n,f,b,d,t,none,long\n"
            "01234,NA,NA,1,true,2020-01-02,2020-01-02 03:04:05,,12345678901234567890\n"
            "99999,US,3,2.5,False,2020-01-03,2020-01-03,,1\n"
        },
    )
    table = read_rows(tmp_path, "csv")
    assert table.to_pylist()[0] == {
        "zip": "01234",
        "code": "NA",
        "n": None,
        "f": 1.0,
        "b": True,
        "d": datetime.date(2020, 1, 2),
        "t": datetime.datetime(2020, 1, 2, 3, 4, 5),
        "none": None,
        "long": "12345678901234567890",
    }


def test_a_late_fraction_makes_the_whole_column_fractions(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.csv": "x\n" + "1\n" * 1_500_000 + "2.5\n"})
    _, snapshot = read_snapshot(tmp_path, "csv")
    assert (snapshot.columns[0].type, snapshot.rows) == ("double", 1_500_001)


def test_an_empty_cell_is_null_and_an_empty_pair_of_quotes_is_text(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.csv": 'a,b\nx,\ny,""\nz,"two\nlines"\n'})
    assert read_rows(tmp_path, "csv").column("b").to_pylist() == [None, "", "two\nlines"]


def test_byte_order_mark_windows_lines_tabs_and_compression_are_understood(tmp_path: Path) -> None:
    write_files(
        tmp_path, {"a.csv": b"\xef\xbb\xbfa,b\r\n1,x\r\n", "b.tsv": "a\tb\n2\ty\n", "c.csv.gz": gzip.compress(b"a,b\n3,z")}
    )
    assert read_rows(tmp_path, "csv").to_pydict() == {"a": [1, 2, 3], "b": ["x", "y", "z"]}


def test_given_types_win_over_inference(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.csv": "id,n\n536365,17850.0\n", "b.csv": "id,n\nC536379,\n"})
    table = read_rows(tmp_path, "csv", types={"id": "string", "n": "int64"})
    assert table.to_pydict() == {"id": ["536365", "C536379"], "n": [17850, None]}


def test_only_the_named_columns_are_read(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.csv": "a,b,c\n1,2,3\n", "b.csv": "c,a\n4,x\n"})
    assert read_rows(tmp_path, "csv", columns=["c"]).to_pydict() == {"c": [3, 4]}


def test_types_that_differ_between_files_name_the_files_the_line_and_the_cure(tmp_path: Path) -> None:
    text = refusal(tmp_path, {"a.csv": "id,x\n1,1\n", "b.csv": f"id,x\nC3,2\n{NUMBERS}", "c.csv": "id,x\n4,1.5\n"})
    assert (
        "column 'id' is string in b.csv and int64 in 2 files (a.csv, c.csv); in b.csv, line 2 (row 0 from 0) holds 'C3'" in text
    )
    assert text.startswith("3 source files: the columns do not fit together\n")
    assert "data.types: {id: string}" in text
    assert "'x'" not in text


def test_every_file_with_a_stray_word_is_named_with_its_line(tmp_path: Path) -> None:
    ones = "1\n" * 10
    text = refusal(tmp_path, {"a.csv": f"x\n1\n?\n{ones}", "b.csv": "x\n2\n3\n", "c.csv": f"x\nn.a.\n{ones}"})
    assert "; in a.csv, line 3 (row 1 from 0) holds '?'; in c.csv, line 2 (row 0 from 0) holds 'n.a.'" in text


def test_a_stray_word_in_a_column_of_numbers_is_found_in_a_single_file(tmp_path: Path) -> None:
    text = refusal(tmp_path, {"a.csv": f"id,x\n{NUMBERS}100,oops\n"})
    assert "a.csv: there is text among numbers\n" in text
    assert "column 'x' holds numbers in 100 of 101 rows; in a.csv, line 102 (row 100 from 0) holds 'oops'" in text
    first = (
        "Next: correct the cells, or count them as missing and leave their rows out: data.csv: {nulls: ['oops']}, data.invalid"
    )
    assert f"{first}: drop; or read the columns as types that hold all of them: data.types: {{x: string}}" in text
    text = refusal(tmp_path / "typed", {"a.csv": f"id,x\n{NUMBERS}100,oops\n"}, types={"x": "float64"})
    assert f"{first}: drop; or set data.types: {{x: string}}" in text


def test_a_value_that_breaks_a_given_type_is_named(tmp_path: Path) -> None:
    text = refusal(tmp_path, {"a.csv": 'n,t\n1,"two\nlines"\n12.5,x\n'}, types={"n": "int64"})
    assert "line 4 (row 1 from 0) holds '12.5' in column 'n', which does not read as int64" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty (zero bytes)"),
        ("a,b\n1,2\n3\n4,5,6\n", "line 3 has 1 instead of 2 fields: '3' (and 1 more"),
        ('a,b\n1,x\n2,"y\n3,z\n', "a quote in the record of line 3 is never closed"),
        ('a,b\n1,x\n2,"y\n3,"z"\n4,w\n', "a quote in the record of line 3 is never closed, or wrongly: it reaches line 4"),
        ("a,b\n1,x\n2,caf\xe9\n".encode("latin1"), "line 3 is not UTF-8 (byte 0xe9 at offset 13, near '2,café')"),
        ("a,b\n1,2\n".encode("utf-16"), "this is UTF-16 text, not CSV\nNext: set data.csv: {encoding: utf-16}"),
        ("# of May\na,b\n1,2\n", "or if '# of May' in the first line names no column, leave that out: data.csv: {skip"),
        ("a,b\n1,2\n# c\n", "line 3 has 1 instead of 2 fields: '# c'\nNext: repair the lines; comments and escapes"),
        ("a,b\n1,2,\n3,4,\n", "line 2 has 3 instead of 2 fields"),
        ("a;b\n1;2\n", "separated by ';'"),
        ("5.1,3.5\n4.9,3.0\n", "the first line holds values"),
        ("a,a\n1,2\n", "header twice\nNext: name the columns in its place: data.csv: {header: [NAME, ...], skip_rows: 1}"),
        ("x,caf\xe9\n1,2\n".encode("latin1"), "the column name 'caf\ufffd' in its first line is not UTF-8"),
        ("a,b\n1,2\n3," + "x" * 9_000_000 + "\n", "a row is longer than 4 MiB"),
        (pa.table({"a": [1]}), "this is a Parquet file, not CSV"),
        (b"PK\x03\x04" + b"\0" * 100, "this is a zip file (or an Excel workbook, or an .npz of numpy), not CSV"),
        (b"<!DOCTYPE html>\n<html></html>", "this is an HTML page"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, content: str | bytes | pa.Table, message: str) -> None:
    text = refusal(tmp_path, {"good.csv": "a,b\n1,2\n", "bad.csv": content})
    assert message in text
    assert str(tmp_path / "bad.csv") in text
    assert "good.csv" not in text


def test_a_truncated_gzip_file_is_named(tmp_path: Path) -> None:
    text = refusal(tmp_path, {"a.csv.gz": gzip.compress(f"id,x\n{NUMBERS}".encode())[:-100]})
    assert "a.csv.gz: " in text and "write or fetch the file again" in text


def test_a_column_missing_in_one_file_is_named(tmp_path: Path) -> None:
    text = refusal(tmp_path, {"a.csv": "a,b\n1,2\n", "b.csv": "a\n1\n", "c.csv": "a,b\n1,2\n"})
    assert "column 'b' is missing in b.csv, and there in 2 files (a.csv, c.csv)" in text


def test_all_bad_files_are_counted_and_twenty_are_listed(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{index:02}.csv": "" for index in range(25)} | {"good.csv": "a\n1\n"})
    with pytest.raises(DataError, match="25 of 26 source files cannot be used") as caught:
        read_rows(tmp_path, "csv")
    assert len(caught.value.problems) == 21
    assert caught.value.problems[-1] == "... and 5 more"


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ("n;x;s\n1;0,5;ä\n2;1,5;b,c\n", {"delimiter": ";", "decimal": ","}),
        ("n,x,s\n1,0.5,ä\n2,1.5,'b,c'\n", {"quote": "'"}),
        ("n\tx\ts\n1\t0.5\tä\n2\t1.5\tb,c\n", {"quote": "", "delimiter": "\t"}),
        ("n|x|s\n1|0.5|ä\n2|1.5|b,c\n".encode("latin-1"), {"delimiter": "|", "encoding": "latin-1"}),
        ('n,x,s\n1,0.5,ä\n2,1.5,"b,c"\n'.encode("utf-16"), {"encoding": "utf-16"}),
        ('1,0.5,ä\n2,1.5,"b,c"\n', {"header": ["n", "x", "s"]}),
        ('made "by\n\nhand\nn,x,s\n1,0.5,ä\n2,1.5,"b,c"\n', {"skip_rows": 3}),
    ],
    ids=["semicolon and comma", "quote", "no quotes", "latin-1", "utf-16", "no header", "lines above"],
)
def test_a_file_is_read_as_its_options_say(tmp_path: Path, content: str | bytes, options: dict[str, Any]) -> None:
    write_files(tmp_path, {"a.csv": content})
    assert read_rows(tmp_path, "csv", csv=options).to_pydict() == {"n": [1, 2], "x": [0.5, 1.5], "s": ["ä", "b,c"]}


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "koi8-r"])
def test_a_file_of_utf8_among_those_of_another_encoding_is_named_and_not_misread(tmp_path: Path, encoding: str) -> None:
    letter = "Ж" if encoding == "koi8-r" else "é"
    text = f"a\nplain\n{letter}\n"
    text = refusal(tmp_path, {"a.csv": text.encode(encoding), "b.csv": text.encode()}, csv={"encoding": encoding})
    wrong = letter.encode().decode(encoding)
    assert f"b.csv: is UTF-8, not {encoding}: {letter!r} would be read as {wrong!r}" in text and "/a.csv" not in text


def test_quotes_are_text_where_the_option_is_empty(tmp_path: Path) -> None:
    lines = ['5" pipe\t1', '"quoted start\t2', 'end" of it\t3']
    files: dict[str, str | bytes | pa.Table] = {"a.tsv": "\n".join(["s\tn", *lines])}
    assert 'data.csv: {quote: ""}' in refusal(tmp_path, files)
    table = read_rows(tmp_path, "csv", csv={"quote": ""})
    assert table.to_pydict() == {"s": [line.split("\t")[0] for line in lines], "n": [1, 2, 3]}


def test_words_for_missing_count_in_text_too_and_replace_the_usual_ones(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.csv": "x,s\n1, ?\n?,NA\n,b\n"})
    table = read_rows(tmp_path, "csv", csv={"nulls": ["?"]})
    assert table.to_pydict() == {"x": [1, None, None], "s": [None, "NA", "b"]}


def test_lines_count_from_the_first_of_the_file(tmp_path: Path) -> None:
    text = refusal(
        tmp_path,
        {"a.csv": 'v2\n1;"a\nb"\n1,5;b\n'},
        types={"n": "int64"},
        csv={"skip_rows": 1, "delimiter": ";", "decimal": ",", "header": ["n", "s"]},
    )
    assert "line 4 (row 1 from 0) holds '1,5' in column 'n', which does not read as int64" in text
    assert "a.csv: is not ascii" in refusal(tmp_path, {"a.csv": "a\nä\n"}, csv={"encoding": "ascii"})
    assert 'set data.csv: {delimiter: ";"}' in refusal(tmp_path, {"a.csv": "a;b\n1;2\n"})
    write_files(tmp_path, {"a.csv": "x;y\n1.500;1,5\n"})
    with_dots = read_rows(tmp_path, "csv", csv={"delimiter": ";", "decimal": ","})
    assert with_dots.to_pydict() == {"x": ["1.500"], "y": [1.5]}


def test_times_with_zones_and_integers_of_64_bits_are_what_they_are(tmp_path: Path) -> None:
    long = [1700000000123456789, -9223372036854775808, 9223372036854775807]
    stamps = ["2020-01-01T00:00:00Z", "2020-01-01T02:00:00.5+02:00", ""]
    rows = "".join(f"{n},{t}\n" for n, t in zip(long, stamps, strict=True))
    write_files(tmp_path, {"a.csv": f"n,t\n{rows}"})
    table = read_rows(tmp_path, "csv")
    assert table.column("n").to_pylist() == long
    at = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    assert table.column("t").to_pylist() == [at, at.replace(microsecond=500_000), None]
    write_files(tmp_path, {"a.csv": f"n\n{long[0]}\n1.5\n"})
    assert read_rows(tmp_path, "csv").column("n").to_pylist() == [str(long[0]), "1.5"], "a double would round it"
    assert str(long[0]) in refusal(tmp_path, {"a.csv": f"n\n{long[0]}\n", "b.csv": "n\n1.5\n"})
