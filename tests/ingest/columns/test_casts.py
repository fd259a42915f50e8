"""A cast keeps each value, or is refused."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from penstock.ingest.columns.casts import cast_array, first_bad_row

_TIME = datetime.datetime(2020, 1, 1, 5)
_DAY = datetime.datetime(2020, 1, 1)


@pytest.mark.parametrize(
    ("values", "kind", "result"),
    [
        (pa.array(["9007199254740993", "5.0", "+7", None]), pa.int64(), [9007199254740993, 5, 7, None]),
        (pa.array([" 18446744073709551615", "-0.0"]), pa.uint64(), [18446744073709551615, 0]),
        (pa.array(["10000000000000000", "+0.5"]), pa.float64(), [1e16, 0.5]),
        (pa.array([0, 1, None]), pa.bool_(), [False, True, None]),
        (pa.ExtensionArray.from_storage(pa.bool8(), pa.array([2, 0, None], pa.int8())), pa.bool_(), [True, False, None]),
        (pa.array([_DAY, None]), pa.date32(), [_DAY.date(), None]),
        (pa.array([1.1, 0.07, -123456.78]), pa.decimal128(12, 2), ["1.10", "0.07", "-123456.78"]),
        (pa.array([[1, 0], []]), pa.list_(pa.bool_()), [[True, False], []]),
        (pa.array([_TIME]), pa.timestamp("us", "UTC"), [_TIME.replace(tzinfo=datetime.UTC)]),
        (pa.array([Decimal("0.1"), Decimal("1e16"), None]), pa.float64(), [0.1, 1e16, None]),
        (pa.array(["0.100000001490116", "33554432"]), pa.float32(), [0.10000000149011612, 33554432.0]),
    ],
)
def test_cast_keeps_each_value(values: pa.Array, kind: pa.DataType, result: list[Any]) -> None:
    found = cast_array(values, kind).to_pylist()
    assert [str(each) for each in found] == [str(each) for each in result]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array(["1", "5.5"]), pa.int64()),
        (pa.array(["1", "9007199254740993"]), pa.float64()),
        (pa.array(["1", "9007199254740993"]), pa.float32()),
        (pa.array([1, 2]), pa.bool_()),
        (pa.array([1.0, 0.5]), pa.bool_()),
        (pa.array([0.0, float("nan")]), pa.bool_()),
        (pa.array([[0], [1, 2]]), pa.list_(pa.bool_())),
        (pa.array([{"a": 1}, {"a": 2}]), pa.struct([("a", pa.bool_())])),
        (pa.array([_DAY, _TIME]), pa.date32()),
        (pa.array([_DAY, _TIME]), pa.date64()),
        (pa.array([1.0, 1.005]), pa.decimal128(5, 2)),
        (pa.array([Decimal(1), Decimal(9007199254740993)]), pa.float64()),
        (pa.array([Decimal(1), Decimal(16777217)]), pa.float32()),
        (pa.array(["1", "16777217"]), pa.float32()),
        (pa.array(["0.1", "9007199254740993.0"]), pa.float64()),
        (pa.array(["0.1", "9007199254740993."]), pa.float64()),
        (pa.array([Decimal(1), Decimal("123456789012345678901234567890123")]), pa.float64()),
    ],
)
def test_cast_that_loses_names_the_row(values: pa.Array, kind: pa.DataType) -> None:
    with pytest.raises(pa.ArrowInvalid):
        cast_array(values, kind)
    assert first_bad_row(values, kind) == 1


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.time64("us")])
def test_cast_of_a_moment_without_its_zone_is_refused(kind: pa.DataType) -> None:
    with pytest.raises(pa.ArrowInvalid):
        cast_array(pa.array([_TIME], pa.timestamp("us", "Europe/Rome")), kind)


def test_cast_of_local_time_to_another_zone_is_refused() -> None:
    with pytest.raises(pa.ArrowInvalid):
        cast_array(pa.array([_TIME]), pa.timestamp("us", "Europe/Rome"))
