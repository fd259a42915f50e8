"""Rows of tables, queries and functions are scored: each state once, and a later one in the place of the earlier."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock.flows.predict.flow as predict_flow
from penstock.errors import DataError, SpecError
from penstock.flows.predict.request import PredictRequest
from penstock.training.model import ModelSpec
from penstock.training.predict.output import PredictedUnit
from penstock.training.predict.unit import Scorer, ScoringJob, packed_model
from penstock.training.registry.loaded_model import MODEL_FILE, LoadedModel
from tests.ingest.formats.sources.test_sources import new_iceberg
from tests.training.predict.test_score import made_model, people
from tests.training.registry.test_raw_rows import table_source

FIRST, SECOND = people(0, 6), people(6, 4)

FUNCTION = """\
import pandas


def rows(frame):
    return pandas.read_parquet(frame)
"""


class Rows(NamedTuple):
    """Where rows are, and how more of them come.

    Attributes:
        old: options that name the state before `add`.
    """

    input: str
    options: Mapping[str, Any]
    add: Callable[[], Any]
    old: Callable[[], Mapping[str, Any]]


def delta(folder: Path) -> Rows:
    deltalake = pytest.importorskip("deltalake")
    uri = str(folder / "table")
    deltalake.write_deltalake(uri, FIRST, partition_by=["town"])
    return Rows(uri, {}, lambda: deltalake.write_deltalake(uri, SECOND, mode="append"), lambda: {"version": 0})


def lance(folder: Path) -> Rows:
    lance = pytest.importorskip("lance")
    uri = str(folder / "table")
    lance.write_dataset(FIRST, uri)
    return Rows(uri, {}, lambda: lance.write_dataset(SECOND, uri, mode="append"), lambda: {"version": 1})


def iceberg(folder: Path) -> Rows:
    table, options = new_iceberg(folder, FIRST)
    first = table.current_snapshot().snapshot_id
    return Rows("db.rows", options, lambda: table.append(SECOND), lambda: {"snapshot": first})


def sql(folder: Path) -> Rows:
    def add(rows: pa.Table) -> None:
        with sqlite3.connect(folder / "rows.db") as connection:
            connection.execute("create table if not exists people (id, age integer, height real, town text, weight real)")
            connection.executemany(
                "insert into people values (?, ?, ?, ?, ?)", [tuple(row.values()) for row in rows.to_pylist()]
            )
        connection.close()

    add(FIRST)
    return Rows("select * from people order by id", {"connection": "sqlite:///rows.db"}, lambda: add(SECOND), dict)


def python(folder: Path) -> Rows:
    (folder / "source.py").write_text(FUNCTION)
    pq.write_table(FIRST, folder / "frame.parquet")
    options = {"params": {"frame": str(folder / "frame.parquet")}}

    def add() -> None:
        pq.write_table(pa.concat_tables([FIRST, SECOND]), folder / "frame.parquet")

    return Rows("source.py:rows", options, add, dict)


@pytest.fixture
def score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The flow of predictions, with a model that scores in this process."""
    model = made_model(tmp_path, table_source)

    def here(*given: Any) -> Iterator[PredictedUnit | DataError]:
        jobs: Sequence[ScoringJob] = given[-1]
        return map(Scorer(packed_model(model)), jobs)

    monkeypatch.setattr(predict_flow, "_on_ray", here)
    monkeypatch.chdir(tmp_path)

    def scored(source: str, format: str | None, **options: Any) -> dict[str, Any]:
        out, state = str(tmp_path / "out"), str(tmp_path / ".penstock")
        request = PredictRequest(model=str(model), input=source, output=out, format=format, options=options, state_dir=state)
        data = predict_flow.predict.fn(request).data
        assert isinstance(data, dict)
        return data

    return scored


def ids(folder: Path) -> list[str]:
    return sorted(pq.read_table(folder / "out")["id"].to_pylist())


@pytest.mark.parametrize("made", [delta, iceberg, lance, sql, python], ids=lambda made: made.__name__)
def test_state_is_scored_once_and_replaced_by_later(
    tmp_path: Path, score: Callable[..., dict[str, Any]], made: Callable[[Path], Rows]
) -> None:
    rows, format = made(tmp_path), made.__name__
    first, second = FIRST["id"].to_pylist(), SECOND["id"].to_pylist()
    done = score(rows.input, format, **rows.options)
    assert (done["rows"], done["total_rows"], ids(tmp_path)) == (6, 6, first)
    found = pq.read_table(tmp_path / "out").sort_by("id")
    answer = LoadedModel(tmp_path / "model").predict(found.select(FIRST.column_names))
    assert found["prediction"].to_pylist() == answer["prediction"].tolist()
    parts = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*.parquet")}
    kept = sorted((tmp_path / "out" / "_penstock").rglob("*.arrow"))
    assert score(rows.input, format, **rows.options)["units"] == 0
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*.parquet")} == parts
    assert sorted((tmp_path / "out" / "_penstock").rglob("*.arrow")) == kept, "no row is read twice"
    rows.add()
    again = score(rows.input, format, **rows.options)
    assert again["rows"] == (4 if format in ("delta", "iceberg") else 10), "files of a table that are there already stay"
    assert (again["total_rows"], ids(tmp_path)) == (10, sorted([*first, *second])), "and no row is there twice"
    if old := rows.old():
        assert done["state"].split("-")[0] in ("version", "snapshot") and again["state"] not in ("", done["state"])
        back = score(rows.input, format, **rows.options, **old)
        assert (back["state"], ids(tmp_path)) == (done["state"], first)


def test_other_query_is_refused_with_model_options(tmp_path: Path, score: Callable[..., dict[str, Any]]) -> None:
    rows = sql(tmp_path)
    file = tmp_path / "model" / MODEL_FILE
    spec = ModelSpec.model_validate_json(file.read_bytes())
    assert spec.raw is not None
    spec.raw["data"] |= {"format": "sql", "sql": {**rows.options, "snapshot": "then"}}
    file.write_text(spec.model_dump_json())
    done = score("select * from people where age < 3", None)
    assert (done["rows"], done["state"]) == (2, ""), "but for which state was read"
    with pytest.raises(SpecError, match=r"holds the predictions of another input: select .* age < 3"):
        score("select * from people where age > 3", None, snapshot="now")
    assert len(ids(tmp_path)) == 2


def test_same_query_of_other_database_is_refused(
    tmp_path: Path, score: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = sql(tmp_path)
    (tmp_path / "other.db").write_bytes((tmp_path / "rows.db").read_bytes())
    for database in ("rows.db", "rows.db", "other.db"):
        monkeypatch.setenv("PEOPLE", f"sqlite:///{database}")
        if database == "other.db":
            with pytest.raises(SpecError, match="holds the predictions of another input"):
                score(rows.input, "sql", connection="$PEOPLE")
        else:
            assert score(rows.input, "sql", connection="$PEOPLE")["total_rows"] == 6


def test_file_of_other_folder_is_refused(tmp_path: Path, score: Callable[..., dict[str, Any]]) -> None:
    for day in ("day1", "day2"):
        (tmp_path / day).mkdir()
        pq.write_table(FIRST, tmp_path / day / "rows.parquet")
    assert score(str(tmp_path / "day1"), "parquet")["total_rows"] == 6
    with pytest.raises(SpecError, match=r"holds the predictions of another input: .*day1") as refused:
        score(str(tmp_path / "day2"), "parquet")
    assert "name a folder for this input alone" in refused.value.next_step
    for same in (f"{tmp_path}/day1/", "day1"):
        assert score(same, "parquet")["units"] == 0
