"""A row's split follows from the row alone: added files, batches, layouts and processes never move it, and nothing leaks."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sklearn.datasets import load_breast_cancer, load_digits

from penstock.errors import DataError, SpecError
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.preprocess.chain import split_rows
from penstock.ingest.read.row_hash import hash_columns, unit_interval
from penstock.ingest.read.snapshot import iterate_rows
from penstock.ingest.read.splits import split_codes
from penstock.ingest.schema import SPLITS
from penstock.ingest.spec import DataSpec
from tests import ROOT
from tests.ingest.reading import read_snapshot, write_files

TRAIN = [SourceFile(uri="/a.parquet", name="a.parquet", location="train", size_bytes=1, fingerprint="1")]

RULES = {"validation": {"fraction": 0.2}, "test": {"fraction": 0.1}}

# Written down once: if these change, every dataset is split anew, and rows once held out are trained on.
KNOWN_TABLE = {
    "i": [1, None, -3],
    "f": [0.5, float("nan"), 2.0],
    "s": ["a", "", None],
    "l": [[1, 2], [], None],
    "t": [{"x": 1}, None, {"x": None}],
}
KNOWN_HASHES = [12496130435037978855, 11000442697514297732, 2392122461011939837]


def spec(**options: object) -> DataSpec:
    return DataSpec.model_validate({"format": "parquet", "train": ".", **options})


def hashes(values: pa.Array | pa.ChunkedArray) -> list[int]:
    return hash_columns(pa.table({"c": values}), ["c"]).tolist()


def digits() -> pa.Table:
    """1,797 scanned digits as 64 bytes each; 300 of them twice."""
    images, labels = load_digits(return_X_y=True)
    images, labels = np.concatenate([images, images[:300]]).astype(np.uint8), np.concatenate([labels, labels[:300]])
    return pa.table({"image": pa.FixedSizeListArray.from_arrays(images.ravel(), 64), "label": labels})


def test_hashes_never_change() -> None:
    assert hash_columns(pa.table(KNOWN_TABLE), KNOWN_TABLE).tolist() == KNOWN_HASHES


def test_hashes_are_the_same_in_another_process() -> None:
    code = (
        "import pyarrow as pa; from math import nan; from penstock.ingest.read.row_hash import hash_columns; "
        f"table = pa.table({KNOWN_TABLE!r}); print(hash_columns(table, table.column_names).tolist())"
    )
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.strip() == str(KNOWN_HASHES)


@pytest.mark.parametrize("name", ["digits", "breast cancer"])
def test_leakage_check_no_row_is_in_two_splits(name: str, tmp_path: Path) -> None:
    frame = load_breast_cancer(as_frame=True).frame
    table = digits() if name == "digits" else pa.Table.from_pandas(frame, preserve_index=False)
    write_files(tmp_path, {"a.parquet": table.slice(0, 300), "b.parquet": table.slice(300)})
    data, snapshot = read_snapshot(tmp_path, "parquet", **RULES)
    seen: dict[str, set[str]] = {split: set() for split in SPLITS}
    rows = 0
    for batch in iterate_rows(data, snapshot, snapshot.files, 100):
        for row, code in zip(batch.table.to_pylist(), split_codes(data, batch.table, batch.files), strict=True):
            seen[SPLITS[code]].add(repr(row))
            rows += 1
    assert rows == table.num_rows
    assert all(seen.values())
    assert not (seen["train"] & seen["test"] or seen["train"] & seen["validation"] or seen["validation"] & seen["test"])


def test_shares_are_as_asked() -> None:
    table = pa.table({"a": np.arange(200_000)})
    counts = np.bincount(split_codes(spec(**RULES), table, TRAIN), minlength=3) / table.num_rows
    # Four standard deviations of a fair draw.
    assert counts == pytest.approx([0.7, 0.2, 0.1], abs=4 * (0.25 / table.num_rows) ** 0.5)


def test_shares_are_as_asked_where_the_rules_hash_different_columns() -> None:
    table = pa.table({"a": np.arange(100_000), "g": np.arange(100_000) // 4})
    data = spec(validation={"fraction": 0.3}, test={"fraction": 0.4, "by": "g"})
    codes = split_codes(data, table, TRAIN)
    assert np.bincount(codes, minlength=3) / table.num_rows == pytest.approx([0.3, 0.3, 0.4], abs=0.01)
    in_test = (codes == SPLITS.index("test")).reshape(-1, 4)
    assert (in_test.all(axis=1) == in_test.any(axis=1)).all()


@pytest.mark.parametrize(
    "values",
    [
        np.arange(100_000),
        np.arange(100_000) * 0.1,
        pa.array(np.arange(100_000) * 60, pa.timestamp("s")),
        [f"row {index}" for index in range(100_000)],
        [[index % 7, index] for index in range(100_000)],
        pa.FixedSizeListArray.from_arrays(np.arange(100_000 * 8, dtype=np.int64).view(np.uint8), 64),
    ],
    ids=["integers", "fractions", "times", "text", "lists", "pixels"],
)
def test_hashes_are_distinct_and_spread_evenly(values: object) -> None:
    table = pa.table({"a": values})
    found = hash_columns(table, ["a"])
    assert len(np.unique(found)) == table.num_rows
    counts = np.histogram(unit_interval(found), 100, (0.0, 1.0))[0]
    expected = table.num_rows / 100
    # chi squared with 99 degrees of freedom passes 160 once in 10,000 times.
    assert float(((counts - expected) ** 2 / expected).sum()) < 160


def test_an_added_file_moves_no_row(tmp_path: Path) -> None:
    def codes_by_row() -> dict[str, int]:
        data, snapshot = read_snapshot(tmp_path, "json", **RULES)
        found: dict[str, int] = {}
        for batch in iterate_rows(data, snapshot, snapshot.files):
            codes = split_codes(data, batch.table, batch.files).tolist()
            found |= dict(zip(batch.table.column("id").to_pylist(), codes, strict=True))
        return found

    write_files(tmp_path, {"b.jsonl": "".join(f'{{"id": "{index}", "x": {index}}}\n' for index in range(1000))})
    before = codes_by_row()
    # The new file makes x a fraction in all rows, and brings a column that the old rows do not have.
    write_files(tmp_path, {"a.jsonl": "".join(f'{{"id": "new {index}", "x": 0.5, "y": {{"z": 1}}}}\n' for index in range(10))})
    after = codes_by_row()
    assert len(after) == 1010
    assert all(after[name] == code for name, code in before.items())
    assert set(before.values()) == {0, 1, 2}


SCALARS = st.one_of(st.none(), st.integers(-(2**40), 2**40), st.just(0))
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "i": SCALARS,
            "f": st.one_of(st.none(), st.floats(width=32)),
            "s": st.one_of(st.none(), st.text(max_size=5)),
            "l": st.one_of(st.none(), st.lists(SCALARS, max_size=3)),
            "t": st.one_of(st.none(), st.fixed_dictionaries({"x": SCALARS, "y": st.lists(st.text(max_size=2), max_size=2)})),
            "p": st.one_of(st.none(), st.lists(st.integers(0, 255), min_size=3, max_size=3)),
        }
    ),
    min_size=1,
    max_size=20,
)
SCHEMA = pa.schema(
    {
        "i": pa.int64(),
        "f": pa.float64(),
        "s": pa.string(),
        "l": pa.list_(pa.int64()),
        "t": pa.struct({"x": pa.int64(), "y": pa.list_(pa.string())}),
        "p": pa.list_(pa.uint8(), 3),
    }
)


@settings(deadline=None)
@given(ROWS, st.integers(1, 7))
def test_batches_chunks_and_slices_do_not_matter(rows: list[dict[str, object]], batch_rows: int) -> None:
    table = pa.Table.from_pylist(rows, SCHEMA)
    whole = hash_columns(table, SCHEMA.names)
    parts = [table.slice(start, batch_rows) for start in range(0, table.num_rows, batch_rows)]
    assert np.concatenate([hash_columns(part, SCHEMA.names) for part in parts]).tolist() == whole.tolist()
    copies = pa.concat_tables([pa.Table.from_pylist(part.to_pylist(), SCHEMA) for part in parts])
    assert hash_columns(copies, reversed(SCHEMA.names)).tolist() == whole.tolist()


@settings(deadline=None)
@given(ROWS)
def test_equal_rows_are_equal_and_others_differ(rows: list[dict[str, object]]) -> None:
    table = pa.Table.from_pylist(rows + rows, SCHEMA)
    found = hash_columns(table, SCHEMA.names).tolist()
    assert found[: len(rows)] == found[len(rows) :]
    # A struct that is null and one of nulls only are one value; so are 0.0 and -0.0.
    shown = {repr(table.slice(index, 1).to_pylist()).replace("-0.0", "0.0") for index in range(len(rows))}
    if not any(row["t"] and row["t"]["x"] is None for row in rows):  # type: ignore[index]
        assert len(set(found)) == len(shown)


@pytest.mark.parametrize(
    ("values", "same"),
    [
        (pa.array([1, None, 0], pa.int64()), pa.array([1, None, 0], pa.int32())),
        (pa.array([1, None, 0], pa.int64()), pa.array([1.0, None, -0.0], pa.float64())),
        (pa.array([1.5, None], pa.float64()), pa.array([1.5, None], pa.float32())),
        (pa.array([5, None], pa.date32()), pa.array([5 * 86_400_000, None], pa.timestamp("ms"))),
        (pa.array([1500, -1500], pa.timestamp("ms")), pa.array([1_500_000, -1_500_000], pa.timestamp("us"))),
        (pa.array(["a", None, ""]), pa.array(["a", None, ""], pa.large_string())),
        (pa.array([b"abc", None]), pa.array([b"abc", None], pa.binary(3))),
        (pa.array([[1, None], [], None], pa.list_(pa.int64())), pa.array([[1, None], [], None], pa.large_list(pa.float64()))),
        (
            pa.array([[0, 255], None, [7, None]], pa.list_(pa.uint8(), 2)),
            pa.array([[0, 255], None, [7, None]], pa.list_(pa.int16(), 2)),
        ),
        (pa.array([[-1, 5], [0, 1]], pa.list_(pa.int8(), 2)), pa.array([[-1, 5], [-0.0, 1]], pa.list_(pa.float32(), 2))),
        (pa.array([[300, 5], [0, 1]], pa.list_(pa.int16(), 2)), pa.array([[300, 5], [0, 1]], pa.list_(pa.float64(), 2))),
        (pa.array([{"bytes": b"x", "path": "a"}]), pa.array([{"bytes": b"x", "path": "b"}])),
        (pa.array([{"a": 1, "b": 2}]), pa.array([{"b": 2, "a": 1, "c": None}])),
    ],
    ids=str,
)
def test_layout_does_not_matter(values: pa.Array, same: pa.Array) -> None:
    assert hashes(values) == hashes(same)
    assert hashes(pa.concat_arrays([values, values]).slice(1)) == (hashes(values) * 2)[1:]


def test_null_zero_empty_and_missing_differ() -> None:
    assert len(set(hashes(pa.array([None, 0, 1])))) == 3
    assert len(set(hashes(pa.array([None, "", "0"])))) == 3
    assert len(set(hashes(pa.array([None, [], [None], [0], [None, None], [0, 0]])))) == 6
    assert len(set(hashes(pa.array([None, float("nan"), 0.0, float("inf"), float("-inf")])))) == 5


def test_values_that_change_places_between_columns_make_another_row() -> None:
    table = pa.table({"a": [1, 2], "b": [2, 1]})
    assert len(set(hash_columns(table, ["a", "b"]).tolist())) == 2


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=200), st.floats(0.05, 0.45), st.floats(0.05, 0.45))
def test_groups_never_straddle(groups: list[int], validation: float, test: float) -> None:
    table = pa.table({"g": groups, "x": np.arange(len(groups))})
    data = spec(validation={"fraction": validation, "by": "g"}, test={"fraction": test, "by": "g"})
    codes = split_codes(data, table, TRAIN).tolist()
    assert len({*zip(groups, codes, strict=True)}) == len(set(groups))


def test_pictures_are_told_by_their_bytes() -> None:
    table = pa.table({"image": [b"x", b"x"], "label": ["a", "b"], "path": ["a/1.png", "b/1.png"]})
    for fraction in (0.1, 0.5, 0.9):
        data = spec(format="images", test={"fraction": fraction})
        assert len(set(split_codes(data, table, TRAIN).tolist())) == 1


def rows_by_split(folder: Path, format: str, **options: Any) -> dict[str, list[tuple[str, pa.Table]]]:
    """(file's name, rows) of each split, as they go to the transforms."""
    data, snapshot = read_snapshot(folder, format, **options)
    found: dict[str, list[tuple[str, pa.Table]]] = {split: [] for split in SPLITS}
    for split, table, origin in split_rows(data, snapshot, snapshot.files, 4096):
        found[split].append((Path(origin.names[0]).name, table))
    return found


def test_a_column_of_null_words_that_becomes_text_moves_no_row(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.csv": "id,x\n" + "".join(f"{index},NA\n" for index in range(300))})
    before = rows_by_split(tmp_path, "csv", test={"fraction": 0.5})["test"][0][1].column("id").to_pylist()
    write_files(tmp_path, {"b.csv": "id,x\n-1,text\n"})
    after = rows_by_split(tmp_path, "csv", test={"fraction": 0.5})["test"][0][1].column("id").to_pylist()
    assert before == after


def test_a_rule_may_go_by_columns_that_are_not_prepared(tmp_path: Path) -> None:
    table = pa.table({"g": np.arange(1000) // 10, "h": np.arange(1000) % 2, "x": np.arange(1000), "y": np.zeros(1000)})
    write_files(tmp_path, {"a.parquet": table})
    rule = {"test": {"fraction": 0.4, "by": ["g", "h"]}}
    few, more = (rows_by_split(tmp_path, "parquet", columns=columns, **rule) for columns in (["x"], ["x", "y"]))
    held_out = few["test"][0][1]
    assert held_out.column_names == ["x"] and held_out.column("x").equals(more["test"][0][1].column("x"))
    groups = {(x // 10, x % 2) for x in held_out.column("x").to_pylist()}
    assert len(groups) * 5 == held_out.num_rows, "all rows of a group are in one split"


def test_chunks_of_a_document_stay_in_one_split(tmp_path: Path) -> None:
    files = {f"patient-{index // 3}/{index % 3}.txt": f"{index:04}" * 50 for index in range(60)}
    write_files(tmp_path, dict(files))
    options: dict[str, Any] = {"text": {"rows": "chunk", "chunk_chars": 20}}
    whole = rows_by_split(tmp_path, "text", test={"fraction": 0.4, "by": "path"}, **options)
    assert sum(len(found) for found in whole.values()) == 60 and len(whole["test"]) > 10, "no file is in two splits"


def test_files_of_their_own_location_stay_there() -> None:
    data = spec(validation="val", test={"fraction": 0.5})
    table = pa.table({"a": range(100)})
    elsewhere = [TRAIN[0].model_copy(update={"location": "validation"})]
    assert set(split_codes(data, table, elsewhere).tolist()) == {SPLITS.index("validation")}
    assert set(split_codes(data, table, TRAIN).tolist()) == {SPLITS.index("train"), SPLITS.index("test")}
    assert split_codes(data, table, TRAIN).dtype == np.int32


def test_three_hundred_datasets_each_keep_their_rows() -> None:
    data = spec(datasets={f"d{number}": f"d{number}.parquet" for number in range(300)}, test={"fraction": 0.5})
    for name in ("d0", "d255", "d299"):
        codes = split_codes(data, pa.table({"a": range(3)}), [TRAIN[0].model_copy(update={"location": name})])
        assert [data.locations[code] for code in codes] == [name] * 3


def test_rows_without_a_group_are_counted_and_refused() -> None:
    data = spec(test={"fraction": 0.5, "by": "g"})
    with pytest.raises(DataError, match=r"data\.test\.by: column 'g' is null in 2 of 3 rows"):
        split_codes(data, pa.table({"g": [None, "a", None]}), TRAIN)
    with pytest.raises(DataError, match="there is no column 'g'"):
        split_codes(data, pa.table({"h": [1]}), TRAIN)


def test_fractions_must_leave_rows_to_train_on() -> None:
    data = spec(validation={"fraction": 0.6}, test={"fraction": 0.4})
    with pytest.raises(SpecError, match="add up to 1 or more"):
        split_codes(data, pa.table({"g": [1]}), TRAIN)


def codes_of(folder: Path, format: str = "parquet", **options: Any) -> dict[str, list[int]]:
    """The split of each row, by file."""
    data, snapshot = read_snapshot(folder, format, **options)
    found: dict[str, list[int]] = {}
    for batch in iterate_rows(data, snapshot, snapshot.files, 100):
        found.setdefault(batch.files[0].name, []).extend(split_codes(data, batch.table, batch.files).tolist())
    return found


def rare(rows: int, start: int) -> pa.Table:
    ids = np.arange(start, start + rows)
    return pa.table({"id": ids, "y": np.where(ids % 20 == 0, "rare", np.where(ids % 3 == 0, "some", "many"))})


def test_strata_have_their_exact_share_in_each_file_and_an_added_file_moves_no_row(tmp_path: Path) -> None:
    rules = {split: {"fraction": share, "stratify": "y"} for split, share in (("validation", 0.2), ("test", 0.1))}
    write_files(tmp_path, {"a.parquet": rare(1000, 0), "b.parquet": rare(333, 5000)})
    before = codes_of(tmp_path, **rules)
    for name, table in (("a.parquet", rare(1000, 0)), ("b.parquet", rare(333, 5000))):
        codes, classes = np.array(before[name]), np.array(table.column("y"))
        for value in ("rare", "some", "many"):
            shares = np.bincount(codes[classes == value], minlength=3) - np.array([0.7, 0.2, 0.1]) * (classes == value).sum()
            assert np.abs(shares).max() < 1, f"{value} in {name}"
    write_files(tmp_path, {"0.parquet": rare(500, 9000)})
    assert {name: codes for name, codes in codes_of(tmp_path, **rules).items() if name != "0.parquet"} == before


def test_strata_leave_equal_rows_of_a_file_together_and_say_what_is_no_class(tmp_path: Path) -> None:
    table = rare(200, 0)
    write_files(tmp_path, {"a.parquet": pa.concat_tables([table, table])})
    codes = codes_of(tmp_path, validation={"fraction": 0.3, "stratify": "y"})["a.parquet"]
    assert codes[:200] == codes[200:] and 1 in codes
    many = tmp_path / "many"
    write_files(many, {"a.parquet": pa.table({"y": np.arange(10_001)})})
    with pytest.raises(DataError, match=r"10,001 values of 'y', which is not a class column"):
        codes_of(many, validation={"fraction": 0.3, "stratify": "y"})
    with pytest.raises(SpecError, match="same `by` and `stratify`"):
        codes_of(tmp_path, validation={"fraction": 0.3, "stratify": "y"}, test={"fraction": 0.3})


def test_a_picture_has_its_stratum_by_its_own_hash() -> None:
    table = pa.table({"image": [b"%d" % n for n in range(500)], "label": ["a", "b"] * 250, "path": ["x"] * 500})
    plain, by_class = (spec(format="images", test={"fraction": 0.3, **more}) for more in ({}, {"stratify": "label"}))
    files = [TRAIN[0]] * 500
    assert split_codes(plain, table, files).tolist() == split_codes(by_class, table, files).tolist()


@pytest.mark.parametrize("unit", ["s", "ns"])
def test_rows_are_held_out_by_time(unit: str) -> None:
    midnight = np.datetime64("2026-01-01", "s")
    times = (midnight + np.arange(-3, 3)).astype(f"datetime64[{unit}]")
    rules = {"validation": {"by": "t", "after": "2026-01-01"}, "test": {"by": "t", "after": "2026-01-01T00:00:01.5"}}
    assert split_codes(spec(**rules), pa.table({"t": times}), TRAIN).tolist() == [0, 0, 0, 1, 1, 2]
    zoned = {"validation": {"by": "t", "after": "2026-01-01T01:00:00+01:00", "before": "2026-01-01T00:00:01Z"}}
    table = pa.table({"t": pa.array(times).cast(pa.timestamp(unit, "America/New_York"))})
    assert split_codes(spec(**zoned), table, TRAIN).tolist() == [0, 0, 0, 1, 0, 0]
    days = pa.table({"t": pa.array([20453, 20454, 20455], pa.date32())})  # 2025-12-31 is day 20453
    assert split_codes(spec(validation={"by": "t", "after": "2026-01-01"}), days, TRAIN).tolist() == [0, 1, 1]


def test_numbers_are_split_where_they_lie_and_the_rest_by_a_share() -> None:
    table = pa.table({"t": np.arange(20_000), "x": np.arange(20_000)})
    codes = split_codes(spec(test={"by": "t", "after": 9999.5}, validation={"fraction": 0.2}), table, TRAIN)
    assert (codes[10_000:] == 2).all() and not (codes[:10_000] == 2).any()
    assert (codes[:10_000] == 1).mean() == pytest.approx(0.2, abs=0.02)


def test_limit_beyond_float16_splits_without_a_warning() -> None:
    table = pa.table({"t": pa.array([1.0, 60000.0], pa.float16())})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert split_codes(spec(test={"by": "t", "before": 100_000.0}), table, TRAIN).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("values", "rule", "said"),
    [
        (["2026-01-01"], {"after": "2026-01-01"}, r"after and before are times, and column 't' is string"),
        ([1, None], {"after": 1}, "is null in 1 of 2 rows"),
        ([1.0, float("nan")], {"before": 1}, "'t' holds NaN"),
        ([1, 2], {"after": "2026-01-01"}, "are times, and column 't' is int64"),
    ],
)
def test_what_has_no_place_in_time_is_an_error(values: list[Any], rule: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        split_codes(spec(validation={"by": "t", **rule}), pa.table({"t": values}), TRAIN)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"validation": {}}, "validation needs a fraction, or after or before"),
        ({"validation": {"fraction": 0.1, "after": 1, "by": "t"}}, "after and before cannot be used with fraction"),
        ({"validation": {"after": 1}}, "need a column of times or numbers"),
        ({"validation": {"after": float("inf"), "by": "t"}}, "inf is neither a time nor a finite number"),
        ({"validation": {"fraction": 0.1, "by": "g", "stratify": "y"}}, "stratify needs by: row"),
    ],
)
def test_rules_that_say_nothing_clear_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        spec(**options)
