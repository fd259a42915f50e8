"""Whatever a table holds, rows arrive as pyarrow reads them or are refused; no added file moves a row to another split."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.ipc as ipc
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from penstock.errors import DataError
from penstock.ingest.columns.casts import canonical_type
from penstock.ingest.columns.type_text import type_text
from penstock.ingest.preprocess.chain import split_rows
from tests.ingest.preparing import transform_table
from tests.ingest.reading import read_rows, read_snapshot, write_files

FEW = settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
"""Other examples in each test run: many runs try many."""

SCALARS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.null(): st.none(),
    pa.bool_(): st.booleans(),
    **{
        kind: st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        for bits, kind in ((8, pa.int8()), (16, pa.int16()), (32, pa.int32()), (64, pa.int64()))
    },
    **{
        kind: st.integers(0, 2**bits - 1)
        for bits, kind in ((8, pa.uint8()), (16, pa.uint16()), (32, pa.uint32()), (64, pa.uint64()))
    },
    pa.float16(): st.floats(width=16),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.string(): st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
    pa.large_string(): st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
    pa.binary(): st.binary(max_size=3),
    pa.large_binary(): st.binary(max_size=3),
    pa.binary(2): st.binary(min_size=2, max_size=2),
    pa.date32(): st.integers(-700_000, 2_900_000),
    pa.date64(): st.integers(-20_000, 90_000).map(lambda days: days * 86_400_000),
    pa.timestamp("s"): st.integers(-(2**32), 2**37),
    pa.timestamp("ms"): st.integers(-(2**40), 2**47),
    pa.timestamp("us"): st.integers(-(2**40), 2**40),
    pa.timestamp("us", "UTC"): st.integers(-(2**40), 2**40),
    pa.timestamp("ns", "Europe/Rome"): st.integers(0, 2**60),
    pa.time32("s"): st.integers(0, 86_399),
    pa.time32("ms"): st.integers(0, 86_399_999),
    pa.time64("us"): st.integers(0, 86_399_999_999),
    pa.duration("ms"): st.integers(-(2**31), 2**31),
    pa.decimal128(10, 2): st.decimals(-1000, 1000, places=2),
    pa.decimal256(50, 3): st.decimals(-(10**40), 10**40, places=3),
}


def _of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """A value of the type, or None."""
    if pa.types.is_struct(kind):
        value: Any = st.fixed_dictionaries({field.name: _of(field.type) for field in kind})
    elif pa.types.is_map(kind):
        value = st.lists(st.tuples(SCALARS[kind.key_type], _of(kind.item_type)), max_size=3, unique_by=lambda pair: pair[0])
    elif pa.types.is_fixed_size_list(kind):
        value = st.lists(_of(kind.value_type), min_size=kind.list_size, max_size=kind.list_size)
    elif pa.types.is_nested(kind):
        value = st.lists(_of(kind.value_type), max_size=3)
    else:
        value = SCALARS[kind]
    return st.none() | value


KINDS = st.recursive(
    st.sampled_from(list(SCALARS)),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.map(lambda kind: pa.list_(kind, 2)),
        inner.map(lambda kind: pa.struct({"a": kind, "b": pa.int8()})),
        inner.map(lambda kind: pa.map_(pa.string(), kind)),
    ),
    max_leaves=2,
)
AVRO_KINDS = {
    **{pa.null(): "null", pa.bool_(): "boolean", pa.int32(): "int", pa.int64(): "long", pa.float32(): "float"},
    **{pa.float64(): "double", pa.string(): "string", pa.binary(): "bytes"},
    pa.binary(2): {"type": "fixed", "size": 2, "name": "Two"},
    pa.date32(): {"type": "int", "logicalType": "date"},
    pa.time32("ms"): {"type": "int", "logicalType": "time-millis"},
    pa.time64("us"): {"type": "long", "logicalType": "time-micros"},
    pa.timestamp("us"): {"type": "long", "logicalType": "local-timestamp-micros"},
    pa.timestamp("us", "UTC"): {"type": "long", "logicalType": "timestamp-micros"},
    pa.decimal128(10, 2): {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2},
    pa.decimal256(50, 3): {"type": "bytes", "logicalType": "decimal", "precision": 50, "scale": 3},
    pa.list_(pa.int64()): {"type": "array", "items": ["null", "long"]},
    pa.map_(pa.string(), pa.float64()): {"type": "map", "values": ["null", "double"]},
    pa.struct({"a": pa.string(), "b": pa.date32()}): {
        "type": "record",
        "name": "Both",
        "fields": [
            {"name": "a", "type": ["null", "string"]},
            {"name": "b", "type": ["null", {"type": "int", "logicalType": "date"}]},
        ],
    },
}
"""Types that Avro has, and its words for them."""

NUMPY_KINDS = [
    *(kind for kind in SCALARS if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)),
    *(pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("us"), pa.duration("ms"), pa.date32()),
    *(pa.list_(kind, 2) for kind in (pa.int16(), pa.float64(), pa.bool_())),
]

HELD = {"avro": st.sampled_from(list(AVRO_KINDS)), "npz": st.sampled_from(NUMPY_KINDS)}

NAMES = st.sampled_from(["größe (m²)", "a: b, c", "it's", "x.y", "Straße 9", "größe"])

AVRO_NAMES = st.sampled_from(["größe", "Straße_9", "_alter", "_2nd"])


@st.composite
def tables(draw: st.DrawFn, format: str) -> pa.Table:
    """One to three columns; now and then of nulls and dictionaries, where the format has them."""
    rows = draw(st.integers(1, 5))
    columns = {}
    for name in draw(st.lists(AVRO_NAMES if format == "avro" else NAMES, min_size=1, max_size=3, unique=True)):
        kind = draw(HELD.get(format, KINDS))
        is_whole = format == "npz" or (draw(st.booleans()) and not pa.types.is_null(kind))
        value = _of(kind).filter(_is_whole) if is_whole else _of(kind)
        array = pa.array(draw(st.lists(value, min_size=rows, max_size=rows)), kind)
        can_be = format not in HELD and (pa.types.is_string(kind) or pa.types.is_integer(kind))
        columns[name] = array.dictionary_encode() if can_be and draw(st.booleans()) else array
    return pa.table(columns)


def _is_whole(value: Any) -> bool:
    return None not in value if isinstance(value, list) else value is not None


def _write(path: Path, table: pa.Table) -> pa.Table:
    """Write the table; what pyarrow reads back, or of a format that it does not know the table itself."""
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return pq.read_table(path)
    if path.suffix == ".orc":
        orc.write_table(table, path)
        return orc.read_table(path)
    if path.suffix == ".avro":
        fields = [{"name": field.name, "type": _avro_type(field)} for field in table.schema]
        with path.open("wb") as sink:
            fastavro.writer(
                sink, {"type": "record", "name": "Row", "fields": fields}, table.to_pylist(maps_as_pydicts="strict")
            )
        return table
    if path.suffix == ".npz":
        np.savez(path, **{name: _as_numpy(table.column(name).combine_chunks()) for name in table.column_names})
        return table
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    return ipc.open_file(path).read_all()


def _avro_type(field: pa.Field) -> Any:
    kind = AVRO_KINDS[field.type]
    if isinstance(kind, dict) and "name" in kind:
        kind = kind | {"name": f"{kind['name']}_of_{field.name}"}  # or it would be one type, defined twice
    return kind if kind == "null" else ["null", kind]


def _as_numpy(array: pa.Array) -> np.ndarray:
    if pa.types.is_fixed_size_list(array.type):
        return _as_numpy(array.flatten()).reshape(len(array), -1)
    return array.to_numpy(zero_copy_only=False)


@pytest.mark.parametrize("format", ["parquet", "arrow", "orc", "avro", "npz"])
@FEW
@given(data=st.data())
def test_rows_are_what_pyarrow_reads_or_are_refused_by_name(format: str, data: st.DataObject) -> None:
    table = data.draw(tables(format))
    with tempfile.TemporaryDirectory() as folder:
        try:
            expected = _write(Path(folder, f"a.{format}"), table)
        except pa.ArrowException:
            reject()
        try:
            read = read_rows(Path(folder), "numpy" if format == "npz" else format)
        except DataError as error:
            assert _is_named(error, expected), error
            return
    assert read.column_names == expected.column_names
    for name in read.column_names:
        assert _are_same(read.column(name).to_pylist(), expected.column(name).to_pylist())
    try:
        prepared = transform_table(read)
    except DataError as error:
        assert _is_named(error, read), error
        return
    for name in read.column_names:
        made = prepared.column(name).combine_chunks()
        made = made.to_numpy_ndarray() if isinstance(made.type, pa.FixedShapeTensorType) else made.to_numpy()
        plain = [list(value) if isinstance(value, bytes) else value for value in expected.column(name).to_pylist()]
        assert _are_same(made.tolist(), plain)


def _are_same(values: list[Any], others: list[Any]) -> bool:
    return repr(values) == repr(others) or values == others  # NaN is not NaN, and False is 0


def _is_named(error: DataError, table: pa.Table) -> bool:
    """Whether the error says which column it is about, of which type unless it is about some of its rows, and what to do."""
    text = "\n".join([error.message, *error.problems])
    about = [field for field in table.schema if field.name in text]
    of_types = [field for field in about if f" {type_text(canonical_type(field.type))}" in text]
    if drop := re.search(r"drop: (\[.*?\])\)", error.next_step):
        assert {*yaml.safe_load(drop[1])} <= {field.name for field in about}, error
    return bool(error.next_step and about and (of_types or re.search(r"\brows?\b", text)))


_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=4)
ONE_VALUE: dict[pa.DataType, st.SearchStrategy[Any]] = {
    **{kind: SCALARS[kind] for kind in (pa.bool_(), pa.int8(), pa.uint64(), pa.int64(), pa.date32(), pa.timestamp("us"))},
    pa.float64(): st.floats(allow_nan=False, allow_infinity=False),
    pa.string(): _TEXT,
}
"""Types that CSV and JSON lines can hold a value of, without a word for what a number is not."""


@pytest.mark.parametrize("format", ["csv", "json"])
@FEW
@given(data=st.data(), kind=st.sampled_from(list(ONE_VALUE)))
def test_values_written_as_text_come_back_as_the_type_they_had_or_are_refused(
    format: str, data: st.DataObject, kind: pa.DataType
) -> None:
    column = pa.array(data.draw(st.lists(st.none() | ONE_VALUE[kind], min_size=1, max_size=5)), kind)
    table = pa.table({"id": range(len(column)), "column": column})
    with tempfile.TemporaryDirectory() as folder:
        if format == "csv":
            arrow_csv.write_csv(table, Path(folder, "a.csv"))
        else:
            lines = (json.dumps(row, default=str) for row in table.to_pylist())
            Path(folder, "a.json").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        try:
            read = read_rows(Path(folder), format, types={"column": type_text(kind)})
        except DataError as error:
            assert error.next_step, error
            return
    assert read.column("id").to_pylist() == list(range(len(column)))
    assert read.column("column").to_pylist() == column.to_pylist()


CELLS = {
    "csv": st.sampled_from(["", '""', "NA", "null", "1", "007", "1.5", "x", "true", "2020-01-01", "2020-01-01 10:00:00"]),
    "parquet": st.sampled_from([None, True, 1, -1, 2**40, 1.5, 2.0, "x", b"x", [], [1], [1.5], [None], {"a": 1}, {"b": 2}]),
    "jsonl": st.sampled_from([None, 1, 1.5, "x", True, [], [1], [1.5], [None], {"a": 1}, {"a": None, "b": 2}, {"a": [1]}]),
}


RULES: dict[str, dict[str, Any]] = {
    "by rows": {"validation": {"fraction": 0.3}, "test": {"fraction": 0.3}},
    "stratified": {"validation": {"fraction": 0.3, "stratify": "p"}, "test": {"fraction": 0.3, "stratify": "p"}},
}


def _split_of(folder: Path, format: str, rules: str) -> dict[int, str]:
    """The split of each row of file `m`."""
    data, snapshot = read_snapshot(folder, format, **RULES[rules])
    return {
        int(row): split
        for split, _, origin in split_rows(data, snapshot, snapshot.files, 4096)
        for row in origin.rows
        if Path(origin.names[0]).stem == "m"
    }


@pytest.mark.parametrize("extension", list(CELLS))
@FEW
@given(data=st.data())
def test_an_added_file_of_any_cells_moves_no_row_of_another(extension: str, data: st.DataObject) -> None:
    format = extension.removesuffix("l")

    def write(folder: Path, name: str, rows: int) -> None:
        # A column of one kind is more likely to be read at all.
        kinds = [data.draw(st.lists(CELLS[extension], min_size=1, max_size=2)) for _ in range(2)]
        cells = [[kind[row % len(kind)] for kind in kinds] for row in range(rows)]
        if extension == "parquet":
            columns = {
                "id": range(rows),
                **{name: list(column) for name, column in zip("pq", zip(*cells, strict=True), strict=True)},
            }
            try:
                write_files(folder, {f"{name}.parquet": pa.table(columns)})
            except pa.ArrowException:  # values that no column holds together
                reject()
            return
        lines = [",".join(["id", "p", "q"]), *(f"{row},{p},{q}" for row, (p, q) in enumerate(cells))]
        if extension == "jsonl":
            lines = [json.dumps({"id": row, "p": p, "q": q}) for row, (p, q) in enumerate(cells)]
        write_files(folder, {f"{name}.{extension}": "".join(f"{line}\n" for line in lines)})

    rules = data.draw(st.sampled_from(list(RULES)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, "m", 30)
        try:
            before = _split_of(folder, format, rules)
        except DataError:
            reject()
        write(folder, "b", 2)
        try:
            after = _split_of(folder, format, rules)
        except DataError:
            return
        assert after == before
