"""What is called a drift between the data of two runs, and what is not."""

from __future__ import annotations

from typing import Any

from penstock.flows.history.drift import compare_data
from penstock.ingest.materialize.profile import ColumnProfile, Profile
from penstock.tasks.records.data import RunData


def numbers(mean: float, nulls: int = 0) -> ColumnProfile:
    """A thousand of a standard deviation of 1."""
    return ColumnProfile(rows=1000 + nulls, nulls=nulls, count=1000, mean=mean, squares=1000.0, low=mean - 3, high=mean + 3)


def words(**values: int) -> ColumnProfile:
    return ColumnProfile(rows=sum(values.values()), values=values)


def columns(before: dict[str, ColumnProfile], after: dict[str, ColumnProfile]) -> dict[str, dict[str, Any]]:
    sides = (RunData(None, None, Profile(columns={"train": side})) for side in (before, after))
    return {entry["column"]: entry for entry in compare_data(*sides, ())["columns"]}


def test_column_drifts_by_significant_and_notable_shift() -> None:
    found = columns(
        {"still": numbers(5), "moved": numbers(5), "emptied": numbers(5), "town": words(Ulm=600, Bonn=400), "old": numbers(0)},
        {
            "still": numbers(5.09),
            "moved": numbers(5.5),
            "emptied": numbers(5, nulls=250),
            "town": words(Ulm=300, Bonn=500, Kiel=200),
            "new": numbers(0),
        },
    )
    assert [name for name, entry in found.items() if not entry["drifted"]] == ["still"] == [*found][-1:], (
        "those that moved first"
    )
    assert found["moved"]["summary"] == "mean 5 -> 5.5 (+0.50 of its standard deviation)"
    assert found["emptied"]["summary"] == "mean 5 -> 5 (+0.00 of its standard deviation), nulls 0.0% -> 20.0%"
    assert found["town"]["summary"] == "'Ulm' 60.0% -> 30.0%"
    assert (found["old"]["kind"], found["new"]["kind"]) == ("gone", "added")


def test_insignificant_shift_of_few_rows_is_not_drift() -> None:
    few = [ColumnProfile(rows=9, count=9, mean=mean, squares=9.0) for mean in (5.0, 5.9)]
    assert not columns({"x": few[0]}, {"x": few[1]})["x"]["drifted"]
    assert not columns({"x": words(a=5, b=4)}, {"x": words(a=4, b=5)})["x"]["drifted"]
