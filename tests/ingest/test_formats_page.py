"""docs/formats.md says what is read, as what, and what is refused: each line of its tables is tried."""

from __future__ import annotations

import datetime
import io
import itertools
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml
from PIL import Image
from pydantic import ValidationError

from penstock.errors import DataError
from penstock.ingest.columns.casts import promote
from penstock.ingest.columns.type_text import parse_type
from penstock.ingest.formats.registry import FORMATS, format_named
from penstock.ingest.formats.section import spec_class_for
from penstock.ingest.preprocess.chain import split_rows
from tests import ROOT
from tests.ingest.preparing import Source, transform_table
from tests.ingest.reading import read_rows, read_snapshot, write_files

PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The rows of the table below a heading, cell by cell."""
    lines = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")]


def type_of(cell: str) -> pa.DataType:
    text = cell.strip("`")
    return pa.dictionary(pa.int32(), pa.string()) if text == "dictionary<string>" else parse_type(text)


def some_image() -> bytes:
    made = io.BytesIO()
    Image.new("RGB", (2, 2)).save(made, "PNG")
    return made.getvalue()


def value_of(kind: pa.DataType) -> object:
    """One value of the type that says nothing special."""
    if pa.types.is_struct(kind):
        return {field.name: value_of(field.type) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return [value_of(kind.value_type)] * (kind.list_size if pa.types.is_fixed_size_list(kind) else 2)
    if pa.types.is_map(kind):
        return [("a", 1)]
    if pa.types.is_fixed_size_binary(kind):
        return b"x" * kind.byte_width
    if pa.types.is_binary(kind):
        return some_image()
    if pa.types.is_string(kind) or pa.types.is_dictionary(kind):
        return "a"
    if pa.types.is_decimal(kind):
        return Decimal("1.5")
    if pa.types.is_boolean(kind):
        return True
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        return 1000
    return datetime.datetime(2020, 1, 2) if pa.types.is_temporal(kind) else 1


def column_of(kind: pa.DataType) -> pa.Array:
    if isinstance(kind, pa.FixedShapeTensorType):
        return pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((2, *kind.shape), np.float32))
    return pa.array([value_of(kind)] * 2, kind)


@pytest.mark.parametrize(("kind", "becomes", "how"), table("Types as features"))
def test_types_are_read_or_refused_as_documented(tmp_path: Path, kind: str, becomes: str, how: str) -> None:
    rows = pa.table({"x": column_of(type_of(kind))})
    if becomes != "refused":
        made = transform_table(rows).schema.field("x").type
        is_tensor = isinstance(made, pa.FixedShapeTensorType)
        dtype, *shape = becomes.split(", ")
        assert (made.value_type if is_tensor else made) == parse_type(dtype)
        assert is_tensor == (shape == ["one tensor"])
        return
    with pytest.raises(DataError, match="must hold numbers") as refused:
        transform_table(rows)
    step = re.match(r"`(\w+: \{.*?\})`", how)
    if step is None or step[1].startswith("one_hot"):
        return
    assert step[1].replace("float32", "float64").replace("int64", "float64") in refused.value.next_step
    for field in transform_table(rows, [yaml.safe_load(step[1])]).schema:
        kind = field.type.value_type if isinstance(field.type, pa.FixedShapeTensorType) else field.type
        assert pa.types.is_integer(kind) or pa.types.is_floating(kind)


FILL = {"imputer": {"columns": "*", "strategy": "constant", "fill_value": 0}}


@pytest.mark.parametrize("cells", [("1,5", "0,25", "7"), ("9223372036854775809", "1")])
def test_numbers_written_as_text_are_refused_with_what_reads_them(tmp_path: Path, cells: tuple[str, ...]) -> None:
    write_files(tmp_path, {"a.csv": "x;y\n" + "".join(f"{cell};1\n" for cell in cells)})
    read = read_rows(tmp_path, "csv", csv={"delimiter": ";"})
    with pytest.raises(DataError, match=f"every column must hold numbers, not '{cells[0]}'") as refused:
        transform_table(read.select(["x"]))
    assert 'cast: {x: float64}, data.csv: {decimal: ","}' in refused.value.next_step
    if "," in cells[0]:
        read = read_rows(tmp_path, "csv", csv={"delimiter": ";", "decimal": ","})
        assert transform_table(read.select(["x"]))["x"].to_pylist() == [1.5, 0.25, 7]
    else:
        assert transform_table(read.select(["x"]), [{"cast": {"x": "float64"}}])["x"][0].as_py() == 2.0**63


@pytest.mark.parametrize(("first", "second", "common"), table("Files that differ"))
def test_types_of_two_files_unify_as_documented(first: str, second: str, common: str) -> None:
    expected = None if common == "refused" else type_of(common)
    assert promote(type_of(first), type_of(second)) == promote(type_of(second), type_of(first)) == expected


def test_the_page_has_every_format_and_its_endings() -> None:
    said = {row[0].strip("`"): tuple(row[1].split()) for row in table("Formats")}
    assert said == {name: format_named(name).extensions for name in FORMATS.names}


def test_folder_of_other_format_is_named(tmp_path: Path) -> None:
    for name in FORMATS.names:
        form = format_named(name)
        for ending in () if form.is_kept else form.extensions:
            write_files(tmp_path, {f"{name}{ending}/a{ending}": "x"})
            other = "csv" if name != "csv" else "parquet"
            with pytest.raises(DataError, match=f"no {other} file") as refused:
                read_rows(tmp_path, other, train=f"{name}{ending}")
            assert name in refused.value.next_step, ending
    for ending, form in {"xlsx": "excel", "jpg": "images", ".jsonl": "json", "tsv": "csv"}.items():
        with pytest.raises(ValidationError, match=f"`{form}` reads such files"):
            spec_class_for({"format": ending}).model_validate({"format": ending, "train": "."})
    write_files(tmp_path, {"scan/a.heic": "x"})
    with pytest.raises(DataError) as refused:
        read_rows(tmp_path, "images", train="scan")
    assert "convert them to PNG" in refused.value.next_step


def test_mixed_precision_of_decimals_and_times_is_read_exactly(tmp_path: Path) -> None:
    first = {"d": pa.array([Decimal("1.50")], pa.decimal128(5, 2)), "t": pa.array([1], pa.time32("s"))}
    second = {"d": pa.array([Decimal("0.0001")], pa.decimal128(9, 4)), "t": pa.array([1], pa.time64("us"))}
    for table_, unit, zone in ((first, "ms", "UTC"), (second, "us", "Europe/Rome")):
        table_ |= {"at": pa.array([1], pa.timestamp(unit, zone)), "took": pa.array([7], pa.duration(unit))}
    write_files(tmp_path, {"a.parquet": pa.table(first), "b.parquet": pa.table(second)})
    read = read_rows(tmp_path, "parquet")
    assert read.column("d").to_pylist() == [Decimal("1.5000"), Decimal("0.0001")]
    assert read.column("t").cast(pa.int64()).to_pylist() == [1_000_000, 1]
    assert read.column("at").cast(pa.int64()).to_pylist() == [1000, 1]
    assert read.column("took").cast(pa.int64()).to_pylist() == [7000, 7]


def split_of(folder: Path) -> Iterator[tuple[str, int]]:
    data, snapshot = read_snapshot(folder, "parquet", validation={"fraction": 0.3}, missing_columns="null")
    for split, _, origin in split_rows(data, snapshot, snapshot.files, 4096):
        yield from (
            (split, int(row)) for row, name in zip(origin.rows, itertools.cycle(origin.names), strict=False) if "a.p" in name
        )


def test_a_file_that_widens_types_or_adds_a_column_moves_no_row(tmp_path: Path) -> None:
    first = {
        "d": pa.array([Decimal(n).scaleb(-2) for n in range(400)], pa.decimal128(5, 2)),
        "t": pa.array(range(400), pa.time32("s")),
        "took": pa.array(range(400), pa.duration("s")),
        "at": pa.array(range(400), pa.timestamp("s", "Europe/Rome")),
    }
    second = {
        "d": pa.array([Decimal("1E-9")], pa.decimal128(20, 9)),
        "t": pa.array([1], pa.time64("ns")),
        "took": pa.array([1], pa.duration("us")),
        "at": pa.array([1], pa.timestamp("us", "UTC")),
        "new": pa.array([1.0]),
    }
    write_files(tmp_path, {"a.parquet": pa.table(first)})
    before = sorted(split_of(tmp_path))
    write_files(tmp_path, {"b.parquet": pa.table(second)})
    assert sorted(split_of(tmp_path)) == before
    assert {split for split, _ in before} == {"train", "validation"}


@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_a_column_that_a_file_lacks_is_refused_or_null_there(tmp_path: Path, format: str) -> None:
    rows = {"a": pa.table({"x": [1, 2]}), "b": pa.table({"x": [3], "y": [0.5]}), "c": pa.table({"y": [1.5, 2.5]})}
    for name, table_ in rows.items():
        text = "\n".join([",".join(table_.column_names), *(",".join(map(str, row.values())) for row in table_.to_pylist())])
        write_files(tmp_path, {f"{name}.{format}": text if format == "csv" else table_})
    with pytest.raises(DataError, match=r"column 'y' is missing in a\.") as refused:
        read_rows(tmp_path, format)
    assert "data.missing_columns: null" in refused.value.next_step
    everything = {"x": [1, 2, 3, None, None], "y": [None, None, 0.5, 1.5, 2.5]}
    assert read_rows(tmp_path, format, missing_columns="null").to_pydict() == everything
    only = read_rows(tmp_path, format, missing_columns="null", columns=["y"])
    assert only.to_pydict() == {"y": everything["y"]}
    data = {"format": format, "train": ".", "missing_columns": None}  # what YAML reads of `missing_columns: null`
    source = Source.of(tmp_path, {}, [FILL], **data)
    assert source.materialize().rows["train"] == 5
