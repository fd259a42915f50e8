"""Whatever a table holds, rows arrive as pyarrow reads them or are refused; no added file moves a row to another split."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.ipc as ipc
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from penstock.errors import DataError
from penstock.ingest.columns.type_text import type_text
from penstock.ingest.preprocess.chain import split_rows
from tests.ingest.preparing import transform_table
from tests.ingest.reading import read_rows, read_snapshot, write_files

FEW = settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))

SCALARS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.null(): st.none(),
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.string(): st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
    pa.large_binary(): st.binary(max_size=3),
    pa.binary(2): st.binary(min_size=2, max_size=2),
    pa.date32(): st.integers(-700_000, 2_900_000),
    pa.timestamp("us"): st.integers(-(2**40), 2**40),
    pa.timestamp("ns", "Europe/Rome"): st.integers(0, 2**60),
    pa.time64("us"): st.integers(0, 86_399_999_999),
    pa.duration("ms"): st.integers(-(2**31), 2**31),
    pa.decimal128(10, 2): st.decimals(-1000, 1000, places=2),
}


def _of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """A value of the type, or None."""
    if pa.types.is_struct(kind):
        value: Any = st.fixed_dictionaries({field.name: _of(field.type) for field in kind})
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
    ),
    max_leaves=2,
)


@st.composite
def columns(draw: st.DrawFn) -> pa.Array:
    kind = draw(KINDS)
    whole = draw(st.booleans())
    values = draw(st.lists(_of(kind), min_size=1, max_size=5))
    array = pa.array([value for value in values if value is not None] if whole else values, kind)
    if draw(st.booleans()) and (pa.types.is_string(kind) or pa.types.is_integer(kind)):
        array = array.dictionary_encode()
    return array if len(array) else reject()


def _write(path: Path, table: pa.Table) -> pa.Table:
    """Write the table; what pyarrow reads back."""
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return pq.read_table(path)
    if path.suffix == ".orc":
        orc.write_table(table, path)
        return orc.read_table(path)
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    return ipc.open_file(path).read_all()


@pytest.mark.parametrize("format", ["parquet", "arrow", "orc"])
@FEW
@given(column=columns())
def test_rows_are_what_pyarrow_reads_or_are_refused_by_name(format: str, column: pa.Array) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"a.{format}")
        try:
            expected = _write(path, pa.table({"column": column})).column("column").to_pylist()
        except pa.ArrowException:
            reject()
        try:
            read = read_rows(Path(folder), format)
            assert repr(read.column("column").to_pylist()) == repr(expected)
            prepared = transform_table(read)
        except DataError as error:
            assert "column" in str(error) and error.next_step
            return
    made = prepared.column("column").combine_chunks()
    made = made.to_numpy_ndarray() if isinstance(made.type, pa.FixedShapeTensorType) else made.to_numpy()
    plain = [list(value) if isinstance(value, bytes) else value for value in expected]
    assert repr(made.tolist()) == repr(plain) or made.tolist() == plain  # False == 0


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
    "folds": {"folds": 3, "fold": 1, "test": {"by": "id", "after": 20}},
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
