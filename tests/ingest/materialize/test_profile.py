"""What is noted of rows as they pass: the same in one part or in many, and what numpy says of them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from penstock.ingest.materialize.profile import LIST_VALUES, MAX_VALUES, Profiler, merged
from penstock.ingest.preprocess.problems import Origin


def table(rows: int, seed: int) -> pa.Table:
    random = np.random.default_rng(seed)
    ages = [None if draw < 0.2 else float(draw) for draw in random.random(rows)]
    pixels = pa.FixedSizeListArray.from_arrays(pa.array(random.integers(0, 9, rows * 3)), 3)
    words = pa.array(random.choice(["red", "blue"], rows))
    ids = pa.array([f"{seed}-{row}" for row in range(rows)])
    return pa.table(
        {"age": pa.array(ages, pa.float64()), "pixels": pixels, "colour": words, "id": ids, "raw": pa.array([b"x"] * rows)}
    )


def test_merged_profiles_equal_numpy() -> None:
    tables = [table(50, 1), table(70, 2), table(MAX_VALUES, 3)]
    parts = []
    for number, part in enumerate(tables):
        profiler = Profiler({f"file:///{number}": ("train", f"{number}.csv")})
        profiler.read("train", part.slice(0, 20))
        profiler.read("train", part.slice(20))
        origin = Origin.of_file(f"file:///{number}", 0, part.num_rows)
        profiler.prepared("train", origin, np.arange(part.num_rows) % 2)
        parts.append(profiler.profile())
    whole, columns = merged(parts), merged(parts).columns["train"]
    together = pa.concat_tables(tables)
    ages = np.array([value for value in together.column("age").to_pylist() if value is not None])
    age = columns["age"]
    assert (age.rows, age.nulls, age.count) == (184, together.column("age").null_count, len(ages))
    assert (age.mean, age.std, age.low, age.high) == pytest.approx((ages.mean(), ages.std(), ages.min(), ages.max()))
    flat = np.array(together.column("pixels").to_pylist()).ravel()
    assert (columns["pixels"].count, columns["pixels"].mean) == (len(flat), pytest.approx(flat.mean()))
    assert columns["colour"].values == {w: together.column("colour").to_pylist().count(w) for w in ("red", "blue")}
    assert columns["id"].values is None, "a different name in every row is not a category"
    assert "raw" not in columns
    assert [(file.name, file.rows, file.classes) for file in whole.files] == [
        ("0.csv", {"train": 50}, {"0": 25, "1": 25}),
        ("1.csv", {"train": 70}, {"0": 35, "1": 35}),
        ("2.csv", {"train": 64}, {"0": 32, "1": 32}),
    ]


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_of_long_lists_a_bounded_sample_is_counted(rows: int) -> None:
    values = np.random.default_rng(rows).normal(5, 1, 40 * LIST_VALUES // rows * rows)
    profiler = Profiler({"file:///0": ("train", "0.csv")})
    profiler.read("train", pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(values), len(values) // rows)}))
    found = profiler.profile().columns["train"]["x"]
    assert found.rows == rows and LIST_VALUES / 2 < found.count < 2 * LIST_VALUES
    assert found.mean == pytest.approx(5, abs=0.05)
