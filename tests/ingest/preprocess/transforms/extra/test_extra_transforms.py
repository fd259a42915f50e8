"""Transforms that few need: fields of structs."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.errors import DataError
from tests.ingest.preparing import transform_table

FILL = {"imputer": {"columns": "*", "strategy": "constant", "fill_value": 0}}


def test_structs_become_columns_and_their_nulls_stay() -> None:
    structs = pa.array([{"a": 1, "b": {"c": 0.5}}, None, {"a": None, "b": None}])
    made = transform_table(pa.table({"s": structs, "x": [1, 2, 3]}), [{"flatten": {"columns": "*"}}, FILL])
    assert made.select(["s.a", "s.b.c", "x"]).to_pydict() == {"s.a": [1, 0, 0], "s.b.c": [0.5, 0.0, 0.0], "x": [1, 2, 3]}
    with pytest.raises(DataError, match=r"flatten gives two columns the name 's\.a'"):
        transform_table(pa.table({"s": structs, "s.a": [1, 2, 3]}), [{"flatten": {"columns": ["s"]}}])
    with pytest.raises(DataError, match="flatten cannot take column 'x'"):
        transform_table(pa.table({"x": [1]}), [{"flatten": {"columns": ["x"]}}])
