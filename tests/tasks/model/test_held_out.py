"""Which held-out rows belong to which slice? By the source's values, in the order of the prepared rows, in any process."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import SpecError
from penstock.tasks.model.held_out import MAX_VALUES, HeldOut, slices_of
from tests.ingest.preparing import Source

ROWS = 120


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> HeldOut:
    """Rows whose prepared column `x` is their number; towns and ages are gone from the prepared rows. As a worker gets it."""
    table = pa.table(
        {
            "x": pa.array(range(ROWS), pa.float32()),
            "town": [None if row % 11 == 0 else ("Ulm", "Bonn")[row % 2] for row in range(ROWS)],
            "age": pa.array([None if row % 7 == 0 else row % 60 for row in range(ROWS)], pa.int64()),
            "name": [f"r{row}" for row in range(ROWS)],
            "dose": pa.array([np.nan if row % 3 == 0 else 0.5 for row in range(ROWS)], pa.float32()),
            "word": [None if row % 2 == 0 else "null" for row in range(ROWS)],
            "tags": [[row] for row in range(ROWS)],
            "number": pa.array(range(2**53 + 1, 2**53 + 1 + ROWS), pa.int64()),
        }
    )
    files: dict[str, Any] = {f"train/{part}.parquet": table.slice(part * 40, 40) for part in range(3)}
    rule = {"fraction": 0.9, "by": "name"}
    source = Source.of(
        tmp_path_factory.mktemp("slices"),
        files,
        [{"drop": ["town", "age", "name", "dose", "word", "tags", "number"]}],
        test=rule,
    )
    return pickle.loads(
        pickle.dumps(HeldOut(source.data, source.snapshot(), source.steps, source.materialize(), source.storage))
    )


def test_slice_holds_rows_of_its_source_values(held_out: HeldOut) -> None:
    numbers = np.concatenate([table["x"].to_numpy() for table, _ in held_out.raw("test")]).astype(np.int64)
    assert len(numbers) == held_out.manifest.rows["test"] > MAX_VALUES
    said: list[str] = []
    found = {each.name: each for each in slices_of(held_out, "test", ["town", {"age": [18, 30]}, "name"], said.append)}
    expected = {
        "town=Ulm": (numbers % 2 == 0) & (numbers % 11 != 0),
        "town=Bonn": (numbers % 2 == 1) & (numbers % 11 != 0),
        "town=null": numbers % 11 == 0,
        "age<18": (numbers % 60 < 18) & (numbers % 7 != 0),
        "18<=age<30": (numbers % 60 >= 18) & (numbers % 60 < 30) & (numbers % 7 != 0),
        "age>=30": (numbers % 60 >= 30) & (numbers % 7 != 0),
        "age=null": numbers % 7 == 0,
    }
    for name, rows in expected.items():
        assert found[name].rows.tolist() == rows.tolist(), name
    assert sum(each.column == "name" for each in found.values()) == MAX_VALUES
    assert said == [f"evaluate.slices: 'name' has {len(numbers)} values; the {MAX_VALUES} of most rows are measured"]


def test_slices_of_odd_values_are_named_apart(held_out: HeldOut) -> None:
    numbers = np.concatenate([table["x"].to_numpy() for table, _ in held_out.raw("test")]).astype(np.int64)
    edges = {"number": [1234567.0, 1234568.0, float(2**53 + 40)]}
    found = {each.name: each.rows.tolist() for each in slices_of(held_out, "test", ["dose", "word", edges], print)}
    assert found["dose=nan"] == (numbers % 3 == 0).tolist() and found["dose=0.5"] == (numbers % 3 != 0).tolist()
    assert found["word=null"] == (numbers % 2 == 0).tolist() and found["word='null'"] == (numbers % 2 == 1).tolist()
    large = [name for name in found if "number" in name]
    assert large == ["1234568.0<=number<9007199254741032.0", "number>=9007199254741032.0"]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("towm", "no column 'towm'; did you mean 'town'"),
        ({"town": [1.0]}, "'town' is string, and edges"),
        ("tags", r"'tags' is list<.*>, and slices are of single values"),
    ],
)
def test_unusable_slice_column_is_refused(held_out: HeldOut, wanted: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as refused:
        slices_of(held_out, "test", [wanted], print)
    assert refused.value.next_step


def test_split_with_own_files_is_read_from_them(held_out: HeldOut) -> None:
    assert held_out.location("test") == "train"
    assert replace(held_out, data=held_out.data.model_copy(update={"test": "elsewhere/"})).location("test") == "test"
