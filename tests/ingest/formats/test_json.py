"""JSON: a missing key is null, numbers widen, and whatever is wrong is named by file and line."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import DataError
from penstock.ingest.formats import json as json_format
from penstock.ingest.formats import json_text
from penstock.ingest.formats.registry import reader_of
from tests.ingest.reading import read_rows, read_snapshot, write_files


def refusal(folder: Path, files: dict[str, str | bytes], **options: Any) -> str:
    write_files(folder, files)
    with pytest.raises(DataError) as caught:
        read_rows(folder, "json", **options)
    return str(caught.value)


def test_missing_keys_are_null_and_numbers_widen(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "a.jsonl": '{"a": 1, "day": "2020-01-01"}\n\n{"a": 2.5, "b": null}\n',
            "b.jsonl": '{"b": {"q": 1}, "day": "noon"}\n{}',
        },
    )
    assert read_rows(tmp_path, "json").to_pydict() == {
        "a": [1.0, 2.5, None, None],
        "day": ["2020-01-01", None, "noon", None],
        "b": [None, None, {"q": 1}, None],
    }


def test_values_of_several_kinds_read_as_the_given_type(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {"a.jsonl": '{"a": 536365, "b": 1}\n{"a": "C5"}\n', "b.jsonl": '{"a": "2020-01-01"}\n{"a": null}\n{"a": 1.5}\n'},
    )
    table = read_rows(tmp_path, "json", types={"a": "string"})
    assert table.column("a").to_pylist() == ["536365", "C5", "2020-01-01", None, "1.5"]
    assert table.column("b").to_pylist() == [1, None, None, None, None]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('{"id": 1}\n{"id": 12345678901234567890}\n', "line 2: column 'id' holds 12345678901234567890"),
        ('{"id": 9007199254740993}\n{"id": 0.5}\n', "line 1: column 'id' holds 9007199254740993"),
        ('{"id": 5}\n{"id": [{"n": [18446744073709551615]}]}\n'[10:], "line 1: column 'id' holds 18446744073709551615"),
        ('{"id": 1' + "0" * 400 + "}\n", "line 1: column 'id' holds 1000"),
        ('{"id": 0.5}\n{"id": 9007199254740993.0}\n', "line 2: column 'id' holds 9007199254740993"),
    ],
)
def test_an_integer_that_a_double_would_round_is_refused(tmp_path: Path, content: str, place: str) -> None:
    said = refusal(tmp_path, {"a.jsonl": content})
    assert place in said and "data.types: {id: string}" in said


def test_an_integer_that_a_double_would_round_is_refused_where_another_file_has_fractions(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"a.jsonl": '{"id": 9007199254740993}\n', "b.jsonl": '{"id": 1.5}\n'}
    assert "a.jsonl, line 1: column 'id' holds 9007199254740993" in refusal(tmp_path, files)
    assert read_rows(tmp_path, "json", types={"id": "string"}).column("id").to_pylist() == ["9007199254740993", "1.5"]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [("float", "16777216.0", "16777217.0"), ("list<float>", "[1, 3e9]", "[1, 16777217]"), ("halffloat", "2050", "2049")],
)
def test_integer_beyond_a_narrow_float_is_refused(tmp_path: Path, kind: str, good: str, bad: str) -> None:
    write_files(tmp_path, {"a.jsonl": f'{{"id": {good}}}\n'})
    assert read_rows(tmp_path, "json", types={"id": kind}).column("id").to_pylist() == [json.loads(good)]
    write_files(tmp_path, {"a.jsonl": f'{{"id": {good}}}\n{{"id": {bad}}}\n'})
    with pytest.raises(DataError, match=r"line 2: column 'id' holds .* without rounding") as refused:
        read_rows(tmp_path, "json", types={"id": kind})
    assert refused.value.next_step == "set data.types: {id: string} (or double)"


def test_small_floats_beside_long_integers_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(json_format, "has_long_integer")
    write_files(tmp_path, {"a.jsonl": '{"t": 1700000000000000000, "x": [0.5, null], "y": {"z": -1.5}}\n'})
    assert read_rows(tmp_path, "json", types={"x": "list<float>"}).column("x").to_pylist() == [[0.5, None]]


def test_long_integers_are_read_as_the_type_that_is_given(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": '{"id": 12345678901234567891, "x": 0.12345678901234567}\n'})
    assert read_rows(tmp_path, "json", types={"id": "uint64"}).column("id").to_pylist() == [12345678901234567891]
    assert read_rows(tmp_path, "json", columns=["x"]).column("x").to_pylist() == [0.12345678901234567]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("timestamp[us]", '"2024-01-01T00:00:00"', '"2024-01-01T00:00:00+02:00"'),
        ("timestamp[us, tz=Europe/Rome]", '"2024-01-01T00:00:00+02:00"', '"2024-01-01T00:00:00"'),
        ("timestamp[us, tz=UTC]", '"2024-01-01T00:00:00Z"', '"2024-01-01T00:00:00"'),
        ("list<timestamp[us]>", '["2024-01-01T00:00:00"]', '["2024-01-01T00:00:00+02:00"]'),
        ("list<date32>", '["2024-01-01"]', "[5]"),
        ("struct<t: timestamp[us]>", '{"t": "2024-01-01T00:00:00"}', '{"t": "2024-01-01T00:00:00Z"}'),
        ("date32", "null", "5"),
        ("timestamp[s]", "null", "5"),
        ("float64", "9007199254740992", "9007199254740993"),
        ("float32", "33554432", "16777217"),
        ("float16", "4096", "2049"),
        ("fixed_size_list<float32>[1]", "[16777216]", "[16777217]"),
    ],
)
def test_value_that_a_given_type_would_change_is_refused(tmp_path: Path, kind: str, good: str, bad: str) -> None:
    write_files(tmp_path, {"a.jsonl": f'{{"a": {good}}}\n{{"a": null}}\n'})
    (value, absent) = read_rows(tmp_path, "json", types={"a": kind}).column("a").to_pylist()
    assert (value is None) == (good == "null") and absent is None
    text = refusal(tmp_path, {"a.jsonl": f'{{"a": {good}}}\n\n{{"a": {bad}}}\n'}, types={"a": kind})
    assert "a.jsonl, line 3: column 'a' holds " in text, text


@pytest.mark.parametrize("kind", ["time32[s]", "time64[us]", "duration[s]"])
def test_integer_is_not_taken_as_time_or_duration(tmp_path: Path, kind: str) -> None:
    text = refusal(tmp_path, {"a.jsonl": '{"a": 5}\n'}, types={"a": kind})
    assert f"a.jsonl, line 1: column 'a' holds 5, which does not read as {kind}" in text


@pytest.mark.parametrize(
    ("kind", "values", "place"),
    [
        ("float64", ("8.5", "true"), "line 2: column 'a' holds True"),
        ("float64", ("true", "8.5"), "line 1: column 'a' holds True"),
        ("float64", ("2.5", "true", "9007199254740993"), "line 2: column 'a' holds True"),
        ("list<float64>", ("[8.5]", "5"), "line 2: column 'a' holds 5"),
        ("int64", ("5", "[1]"), "line 2: column 'a' holds [1]"),
    ],
)
def test_kinds_that_no_array_holds_together_name_line(tmp_path: Path, kind: str, values: tuple[str, ...], place: str) -> None:
    text = refusal(tmp_path, {"a.jsonl": "".join(f'{{"a": {value}}}\n' for value in values)}, types={"a": kind})
    assert f"a.jsonl, {place}, which does not read as" in text, text


@pytest.mark.parametrize("kind", ["timestamp[us]", "list<date32>", "fixed_size_list<float32>[2]", "struct<t: date32>"])
def test_column_of_nulls_is_of_its_type_where_another_is_odd(tmp_path: Path, kind: str) -> None:
    write_files(tmp_path, {"a.jsonl": '{"a": null, "b": 1}\n{"b": "x"}\n'})
    table = read_rows(tmp_path, "json", types={"a": kind, "b": "string"})
    assert table.to_pylist() == [{"a": None, "b": "1"}, {"a": None, "b": "x"}]


@pytest.mark.parametrize(
    ("first", "second"), [([1, 2], [1.5]), ([], [1]), ([None], ["x"]), ([{"a": 1}], [{"b": "x"}]), ([[]], [[1], []])]
)
def test_lists_may_differ_between_files(tmp_path: Path, first: list[object], second: list[object]) -> None:
    write_files(tmp_path, {"a.jsonl": json.dumps({"v": first}) + "\n", "b.jsonl": json.dumps({"v": second}) + "\n"})
    found = read_rows(tmp_path, "json").column("v").to_pylist()
    if first == [{"a": 1}]:
        assert found == [[{"a": 1, "b": None}], [{"a": None, "b": "x"}]]
    else:
        assert found == [first, second]


def test_a_type_that_the_parser_does_not_know_is_cast_to(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": '{"v": [1, 2]}\n{"v": null}\n'})
    for kind in ("large_list<float32>", "fixed_size_list<float32>[2]"):
        assert read_rows(tmp_path, "json", types={"v": kind}).column("v").to_pylist() == [[1.0, 2.0], None]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": 2\n{"a": 3}\n', "line 2: not a JSON object"),
        (
            '{"a": 1}\n\n{"a": "x"}\n',
            "line 3: column 'a' changed from number to string: it holds 'x'\nNext: repair the line, or set data.types: {a:",
        ),
        ('{"a": [1]}\n{"a": ["x"]}\n', "line 2: column 'a' changed from number to string: it holds ['x']"),
        (
            '{"a": 1}\n{"a": 2, "b": "\\ud800"}\n',
            "line 2: The surrogate pair in string is invalid.\nNext: repair the line, or leave",
        ),
        ('{"a": 1}\n{"a": ', "line 2: not a JSON object"),
        ('{"a": 1}{"a": 2}\n', "line 1: not a JSON object (Extra data"),
        ('{\n"a": 1\n}\n', "line 1: not a JSON object"),
        ('[{\n"a": 1 2\n}]\n' + " " * 100, "in object 0 (from 0): Expecting ',' delimiter in line 2"),
        ('{"a": 1}\n[1]\n', "line 2: holds [1], not an object"),
        ('{"a": 1, "a": 2}\n', "line 1: not a JSON object (key 'a' is there twice)"),
        ('[{"a": 1},\n {"a": 2}\n', "line 3: a comma or the array's end is expected after element 1 (from 0)"),
        ('[{"a": 1},\n 2]\n', "line 2: holds '2', not an object {...}, as row 1 (from 0)"),
        ('[{"a": 1}\n {"a": 2}]\n', "line 2: a comma or the array's end is expected after element 0 (from 0)"),
        ('[{"a": 1}]\n\n{"a": 2}\n', "line 3: something follows the array's end"),
        (b'[{"a": 1},\n{"a": "\xe9"}]\n', "line 2 is not UTF-8"),
        (b'{"a": 1}\n{"a": "\xe9"}\n', "line 2 is not UTF-8"),
        (b"PAR1" + b"\0" * 20, "this is a Parquet file, not JSON"),
        ("", "empty (zero bytes)"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    text = refusal(tmp_path, {"good.jsonl": '{"a": 1}\n', "bad.jsonl": content})
    assert message in text
    assert str(tmp_path / "bad.jsonl") in text


def test_text_against_numbers_between_files_names_both(tmp_path: Path) -> None:
    text = refusal(tmp_path, {"a.jsonl": '{"a": 1}\n', "b.jsonl": '{"a": null}\n{"a": "x"}\n'})
    assert "column 'a' is int64 in a.jsonl and string in b.jsonl" in text


def test_numbers_read_as_text_or_decimals_are_as_written(tmp_path: Path) -> None:
    numbers = ["1.10", "12345678901234567890.123", "9007199254740993"]
    write_files(tmp_path, {"a.jsonl": "".join(f'{{"a": {number}, "b": "x"}}\n' for number in numbers)})
    assert read_rows(tmp_path, "json", types={"a": "string"}).column("a").to_pylist() == numbers
    kind = "decimal128(30, 3)"
    assert read_rows(tmp_path, "json", types={"a": kind}).column("a").to_pylist() == [Decimal(number) for number in numbers]
    write_files(tmp_path, {"a.jsonl": '{"a": 1.009}\n{"a": "x"}\n'})
    assert "line 1: column 'a' holds 1.009" in refusal(tmp_path, {}, types={"a": "decimal128(5, 2)"})
    write_files(tmp_path, {"a.jsonl": '{"a": "9007199254740993"}\n{"a": 5.0}\n'})
    assert read_rows(tmp_path, "json", types={"a": "int64"}).column("a").to_pylist() == [9007199254740993, 5]


def test_a_large_array_is_refused_with_the_command_that_cuts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "_ARRAY_BYTES", 1 << 20)
    text = refusal(tmp_path, {"a.json": "[" + '{"a": 1},\n' * 200_000 + '{"a": 1}]'})
    assert "a.json: is one array of more than 1 MB" in text and "jq -c '.[]'" in text


def test_a_value_that_breaks_a_given_type_is_named(tmp_path: Path) -> None:
    text = refusal(tmp_path, {"a.jsonl": '{"a": 1}\n\n{"a": "x"}\n'}, types={"a": "int64"})
    assert "line 3: column 'a' holds 'x', which does not read as int64" in text


def test_an_untidy_column_that_is_not_read_does_not_matter(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": '{"a": 1, "z": 1}\n{"a": 2, "z": "x"}\n'})
    assert read_rows(tmp_path, "json", columns=["a"]).to_pydict() == {"a": [1, 2]}


def test_a_column_may_change_from_whole_numbers_late_in_a_large_file(tmp_path: Path) -> None:
    line = '{"a": 1, "pad": "' + "x" * 100 + '"}\n'
    write_files(tmp_path, {"a.jsonl": line * 50_000 + '{"a": 0.5}\n'})
    assert read_rows(tmp_path, "json").column("a").to_pylist()[-2:] == [1.0, 0.5]


@pytest.mark.parametrize("layout", ["array", "array on one line", "pretty array"])
@pytest.mark.parametrize("compressed", [False, True])
def test_array_gives_the_rows_of_json_lines(
    tmp_path: Path, layout: str, compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {
            "id": 2**53 + n,
            "big": 12345678901234567890 if n else None,
            "text": 'a "}]{[" é\\n' * (n % 7),
            "list": [n, {"x": n}][:1],
        }
        for n in range(500)
    ]
    monkeypatch.setattr(json_text, "_BLOCK_BYTES", 1000)  # so that objects are cut by the blocks
    monkeypatch.setattr(json_text, "_HEAD_BYTES", 3)
    one_line = [json.dumps(row, ensure_ascii=False) for row in rows]
    content = {
        "array": "[" + ",\n".join(one_line) + "]\n",
        "array on one line": "\ufeff[" + ",".join(one_line) + "]",
        "pretty array": json.dumps(rows, indent=1),
    }[layout].encode()
    name = "a.json.gz" if compressed else "a.json"
    write_files(tmp_path / "lines", {"a.jsonl": "\n".join(one_line)})
    write_files(tmp_path / "other", {name: gzip.compress(content) if compressed else content})
    types = {"big": "uint64"}
    assert read_rows(tmp_path / "other", "json", types=types) == read_rows(tmp_path / "lines", "json", types=types)
    data, snapshot = read_snapshot(tmp_path / "other", "json", types=types)
    found = reader_of(data).lines(snapshot.files[0], [0, 2])
    line_of = {row: content[: content.find(str(2**53 + row).encode())].count(b"\n") + 1 for row in (0, 2)}
    # A pretty-printed object begins a line before its first field.
    assert found == {row: line - layout.startswith("pretty") for row, line in line_of.items()}
