"""Transforms that few need: hashes of categories, and fields of structs."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import DataError
from tests.ingest.preparing import transform_table

FILL = {"imputer": {"columns": "*", "strategy": "constant", "fill_value": 0}}


def test_hashing_buckets_are_stable() -> None:
    table = pa.table({"c": ["a", "b", "a"], "i": [1, 2, 1], "t": pa.array([["a", "a"], [], ["b"]], pa.list_(pa.string()))})
    made = transform_table(table, [{"hashing": {"columns": ["c", "i", "t"], "buckets": 16}}])
    buckets = made.column("c").to_pylist()
    # Written down once: if these change, a model looks its embeddings up in the wrong places.
    assert buckets == [5, 13, 5]
    assert made.column("i").to_pylist()[0] == made.column("i").to_pylist()[2]
    counts = np.array([row.as_py() for row in made.column("t")])
    assert counts.shape == (3, 16) and counts[0, buckets[0]] == 2 and counts[2, buckets[1]] == 1 and counts.sum() == 3
    other = transform_table(table, [{"hashing": {"columns": ["c"], "buckets": 16, "seed": 1}}, {"drop": ["t"]}])
    assert other.column("c").to_pylist() != buckets


def test_hashing_fills_buckets_evenly() -> None:
    names = [f"user {n}" for n in range(20_000)]
    made = transform_table(pa.table({"c": names}), [{"hashing": {"columns": "*", "buckets": 20}}])
    counts = np.bincount(made.column("c").to_numpy(), minlength=20)
    # chi squared with 19 degrees of freedom passes 50 about once in 10,000 times.
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 50


def test_structs_become_columns_and_their_nulls_stay() -> None:
    structs = pa.array([{"a": 1, "b": {"c": 0.5}}, None, {"a": None, "b": None}])
    made = transform_table(pa.table({"s": structs, "x": [1, 2, 3]}), [{"flatten": {"columns": "*"}}, FILL])
    assert made.select(["s.a", "s.b.c", "x"]).to_pydict() == {"s.a": [1, 0, 0], "s.b.c": [0.5, 0.0, 0.0], "x": [1, 2, 3]}
    with pytest.raises(DataError, match=r"flatten gives two columns the name 's\.a'"):
        transform_table(pa.table({"s": structs, "s.a": [1, 2, 3]}), [{"flatten": {"columns": ["s"]}}])
    with pytest.raises(DataError, match="flatten cannot take column 'x'"):
        transform_table(pa.table({"x": [1]}), [{"flatten": {"columns": ["x"]}}])
