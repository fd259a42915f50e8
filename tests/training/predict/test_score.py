"""Every file of an input is scored once, whatever happens in between; rows that cannot be are listed with their reason."""

from __future__ import annotations

import errno
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
import safetensors.torch

from penstock.errors import DataError, SpecError
from penstock.ingest.files.listing import list_location
from penstock.progress import silent
from penstock.storage import Storage
from penstock.training.model import ModelSpec
from penstock.training.predict.asked import Asked, ask, check_input, list_input
from penstock.training.predict.output import Output, PredictedUnit
from penstock.training.predict.score import Scored, plan, score
from penstock.training.predict.unit import Scorer, ScoringJob, packed_model
from penstock.training.recipe import load_recipe
from penstock.training.registry.given_rows import given_rows
from penstock.training.registry.load import FetchedModel
from penstock.training.registry.loaded_model import MODEL_FILE, LoadedModel
from penstock.usercode.capture import capture
from tests.ingest.preparing import Source
from tests.ingest.reading import copies_kept
from tests.training.registry.test_raw_rows import Made, images_source, table_source

ADDED = ("prediction", "probability", "probabilities", "file", "row")

NET = """\
import torch


class Net:
    def build_model(self, schema):
        torch.manual_seed(0)
        self.names = [info.name for info in schema.features]
        width = sum(int(torch.tensor(info.shape).prod()) if info.shape else 1 for info in schema.features)
        return torch.nn.Linear(width, schema.num_classes or (2 if schema.label is None else 1))

    def loss(self, model, batch):
        return self.predict(model, batch).mean()

    def predict(self, model, batch):
        return model(torch.cat([batch[name].float().reshape(len(batch[name]), -1) for name in self.names], dim=1))
"""


def made_model(folder: Path, source: Callable[[Path], Any]) -> Path:
    """The folder of a model as it is registered, with weights that nothing has trained."""
    made, model = Made(source(folder / "source")), folder / "model"
    (folder / "net.py").write_text(NET)
    model.mkdir()
    spec = ModelSpec(
        code=capture("net.py:Net", folder),
        params={},
        feed_schema=made.manifest.feed_schema,
        loader="penstock.training.frameworks.torch.loading:load",
        raw=made.raw.form.model_dump(mode="json"),
        batch_rows=16,
    )
    (model / MODEL_FILE).write_text(spec.model_dump_json())
    weights = load_recipe(spec.code, {}).build_model(spec.feed_schema).state_dict()
    safetensors.torch.save_file(weights, model / "model.safetensors")
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of people: nulls are filled or marked, a town that train lacks cannot be used; the label is `kind`, `id` is dropped."""
    return made_model(tmp_path_factory.mktemp("people"), table_source)


def people(first: int, count: int, **more: list[Any]) -> pa.Table:
    rows = range(first, first + count)
    columns = {
        "id": [f"p{row}" for row in rows],
        "age": pa.array([None if row % 5 == 0 else row % 60 for row in rows], pa.int64()),
        "height": pa.array([row / 3 for row in rows], pa.float32()),
        "town": [("Ulm", "Bonn")[row % 2] for row in rows],
        "weight": [row / 7 for row in rows],
    }
    return pa.table({**columns, **more})


class Work:
    """Files, an output, and a model that scores them in this process."""

    def __init__(self, folder: Path, model: Path, format: str | None = None) -> None:
        self.input, self.out, self.model, self.format = folder / "in", folder / "out", model, format
        self.input.mkdir(exist_ok=True)
        self.done: list[ScoringJob] = []

    def write(self, name: str, table: pa.Table) -> None:
        pq.write_table(table, self.input / name)

    def asked(self, columns: Sequence[str] = ()) -> Asked:
        return ask(FetchedModel(self.model), str(self.input), self.format, columns)

    def run(self, columns: Sequence[str] = (), stop_after: int | None = None) -> Scored:
        """Score; `stop_after` so many units ends it as a kill would, between two of them."""
        self.done, scored = [], Scored()
        scorer, output = Scorer(packed_model(self.model)), Output(Storage(str(self.out)))

        def perform(jobs: Sequence[ScoringJob]) -> Iterator[PredictedUnit | DataError]:
            for number, job in enumerate(jobs):
                if number == stop_after:
                    raise KeyboardInterrupt
                self.done.append(job)
                yield scorer(job)

        asked = self.asked(columns)
        files = list_input(asked.data).files
        score(output, asked, files, plan(output, asked, files), perform, silent, scored)
        return scored

    @property
    def scored_files(self) -> list[str]:
        return sorted(file.name for job in self.done for file in job.files)

    def rows(self, side: bool = False) -> pa.Table:
        found = pq.read_table(self.out / "_unscored" if side else self.out)
        return found.sort_by([("file", "ascending"), ("row", "ascending")])


def check_rows(found: pa.Table, expected: pa.Table) -> None:
    """The same rows and predictions; the last bits of scores may be others in batches of other sizes, by the processor."""
    scores = ["probability", "probabilities"]
    assert found.schema == expected.schema and found.drop_columns(scores).equals(expected.drop_columns(scores))
    for name in scores:
        one, other = (np.asarray(table[name].to_pylist()) for table in (found, expected))
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)


@pytest.fixture
def work(tmp_path: Path, model: Path) -> Work:
    return Work(tmp_path, model)


def test_output_holds_source_and_predictions(work: Work, tmp_path: Path) -> None:
    tables = {"a.parquet": people(0, 40), "b.parquet": people(40, 25)}
    for name, table in tables.items():
        work.write(name, table)
    scored = work.run()
    assert scored.rows == 65 and scored.warnings == []
    found = work.rows()
    assert found.column_names == [
        "id",
        "age",
        "height",
        "town",
        "weight",
        "prediction",
        "probability",
        "probabilities",
        "file",
        "row",
    ]
    as_input = list_location("parquet", (".parquet",), tmp_path, str(work.out))
    assert len(as_input.files) == 2 and not as_input.left_out, "records and the side table are not scored again"
    for name, table in tables.items():
        part, answer = found.filter(pa.compute.equal(found["file"], name)), LoadedModel(work.model).predict(table)
        assert part.select(table.column_names).equals(table)
        assert part["row"].to_pylist() == list(range(table.num_rows))
        assert part["prediction"].to_pylist() == answer["prediction"].tolist()
        assert np.allclose(np.array(part["probabilities"].to_pylist()), np.array(answer["probabilities"].tolist()), atol=1e-6)


def test_rescore_does_only_added_files(work: Work) -> None:
    work.write("a.parquet", people(0, 10))
    work.write("b.parquet", people(10, 10))
    work.run()
    before = {path: path.stat().st_mtime_ns for path in work.out.rglob("*") if path.is_file()}
    assert work.run().units == 0 and work.done == []
    assert {path: path.stat().st_mtime_ns for path in work.out.rglob("*") if path.is_file()} == before
    work.write("c.parquet", people(20, 5, label=[1] * 5))
    scored = work.run()
    assert (work.scored_files, scored.rows) == (["c.parquet"], 5)
    assert scored.manifest is not None and scored.manifest.rows == 25


def test_killed_between_units_continues_equal(work: Work, model: Path) -> None:
    for number in range(4):
        work.write(f"{number}.parquet", people(10 * number, 10))
    with pytest.raises(KeyboardInterrupt):
        work.run(stop_after=2)
    stray = work.out / f"part-{'0' * 32}.parquet"  # a part whose process died before it wrote the record
    pq.write_table(people(0, 3), stray)
    assert work.run().units == 2 and not stray.exists()
    other = Work(work.input.parent, model)
    other.out = work.out.with_name("undisturbed")
    other.run()
    assert other.rows().equals(work.rows())
    assert (other.out / "_penstock/manifest.json").read_text().split('"units"')[0] == (
        work.out / "_penstock/manifest.json"
    ).read_text().split('"units"')[0]


def test_changed_file_replaces_rows_and_gone_file_stays(work: Work) -> None:
    for name in ("a.parquet", "b.parquet"):
        work.write(name, people(0, 10))
    work.run()
    work.write("a.parquet", people(100, 4))
    (work.input / "b.parquet").unlink()
    scored = work.run()
    assert work.scored_files == ["a.parquet"] and "b.parquet" in scored.warnings[0]
    counts = work.rows().group_by("file").aggregate([("row", "count")]).to_pydict()
    assert dict(zip(counts["file"], counts["row_count"], strict=True)) == {"a.parquet": 4, "b.parquet": 10}


def test_large_file_is_committed_in_pieces(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(people(0, 100), work.input / "a.parquet", row_group_size=10)
    whole = work.run().rows, work.rows()
    (work.input / "a.parquet").rename(work.input / "b.parquet")  # other rows by their place, the same by their content
    monkeypatch.setattr("penstock.training.predict.score.PIECE_BYTES", 3000)
    work.out = work.out.with_name("pieces")
    with pytest.raises(KeyboardInterrupt):
        work.run(stop_after=1)
    first = [job.piece for job in work.done]
    scored = work.run()
    pieces = [*first, *(job.piece for job in work.done)]
    assert len(pieces) > 2 and [piece[0] for piece in pieces[1:] if piece] == [piece[1] for piece in pieces[:-1] if piece]
    assert scored.manifest is not None and (scored.manifest.rows, work.run().units) == (100, 0)
    check_rows(work.rows().drop_columns(["file"]), whole[1].drop_columns(["file"]))
    work.write("b.parquet", people(7, 3))
    assert work.run().rows == 3 and work.rows().num_rows == 3


def test_other_columns_or_model_rescore_everything(work: Work) -> None:
    work.write("a.parquet", people(0, 10))
    work.run()
    assert work.run(columns=["id"]).units == 1
    assert work.rows().column_names == ["id", *ADDED]
    assert len(list(work.out.glob("*.parquet"))) == 1


def test_other_model_replaces_rows_file_by_file(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.parquet", "b.parquet", "c.parquet"):
        work.write(name, people(0, 10))
    first = work.run().manifest
    assert first is not None and first.rows == 30
    (work.input / "c.parquet").unlink()
    later = FetchedModel(work.model, name="people", version="2")
    monkeypatch.setattr(work, "asked", lambda columns=(): ask(later, str(work.input), None, ["id"]))
    with pytest.raises(KeyboardInterrupt):
        work.run(stop_after=1)
    assert not (work.out / "_penstock/manifest.json").exists(), "not all is scored"
    counts = Counter(name for part in work.out.glob("*.parquet") for name in pq.read_table(part)["file"].to_pylist())
    assert counts == {"a.parquet": 10, "b.parquet": 10, "c.parquet": 10}
    scored = work.run()
    assert "no longer in INPUT" in scored.warnings[0] and "c.parquet" in scored.warnings[0]
    assert scored.manifest is not None
    assert [unit.model for unit in scored.manifest.units] == ["models:/people/2"] * 2 + [first.model]


def test_kill_before_record_scores_part_again(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    work.write("a.parquet", people(0, 10))
    work.run()
    expected = work.rows()
    work.write("a.parquet", people(100, 10))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Output, "commit", killed)
        work.run()
    work.write("a.parquet", people(0, 10))
    assert work.run().units == 1 and work.rows().equals(expected), "the old record does not count for the new part"


def test_unscorable_rows_go_to_side_table(work: Work) -> None:
    town = ["Ulm", "Bonn", "Ulm", "Bonn", "Ulm"]
    weight = pa.array([1.0, None, 2.0, float("nan"), 3.0])
    work.write("a.parquet", people(0, 5, town=town, weight=weight))
    work.write("b.parquet", people(0, 3, weight=["1.5", "heavy", " 2 "]))
    scored = work.run()
    assert (scored.rows, scored.unscored) == (5, 3) and "3 rows could not be scored" in scored.warnings[0]
    side = work.rows(side=True)
    assert side.column_names == ["reason", "file", "row"]
    told = {(row["file"], row["row"]): row["reason"] for row in side.to_pylist()}
    assert told[("a.parquet", 1)] == "column 'weight' holds null; the model needs a value there"
    assert told[("a.parquet", 3)] == "column 'weight' holds nan; the model needs a finite number there"
    assert told[("b.parquet", 1)] == "column 'weight' holds 'heavy', which does not read as double"
    assert work.rows().filter(pa.compute.equal(work.rows()["file"], "b.parquet"))["weight"].to_pylist() == [1.5, 2.0]


def test_json_value_of_other_kind_is_a_problem_of_its_file(tmp_path: Path, model: Path) -> None:
    work = Work(tmp_path, model, "json")
    rows = people(1, 6).to_pylist()
    for name, age in (("a", 3), ("b", "old")):
        some = [*rows[:4], rows[4] | {"age": age}]
        (work.input / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in some))
    with pytest.raises(DataError, match=r"b\.json, line 5: column 'age' changed from number to string.*'old'") as refused:
        work.run()
    assert str(refused.value.next_step).startswith("repair the line") and work.rows().num_rows == 5


def test_label_of_another_type_is_not_read_as_trained(tmp_path: Path, model: Path) -> None:
    work = Work(tmp_path, model, "json")
    rows = people(0, 3, kind=[0, 1, 1]).to_pylist()
    (work.input / "a.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert work.run().rows == 3


def test_unseen_categories_are_scored_and_counted(work: Work) -> None:
    weight = pa.array([1.0, None, 2.0, 3.0, 4.0])
    work.write("a.parquet", people(0, 5, town=["Ulm", "Paris", "Rome", "Bonn", "Oslo"], weight=weight))
    work.write("b.parquet", people(5, 80, town=["Ulm", "Lima"] * 40))
    scored = work.run()
    assert (scored.rows, scored.unscored, scored.unseen) == (84, 1, {"town": 43}), "Paris, too"
    assert "43 values are categories that the train split does not have: town (43)" in scored.warnings
    assert not work.run().unseen, "of what was scored now"


def test_unreadable_file_is_named_others_are_scored(work: Work) -> None:
    work.write("a.parquet", people(0, 10, weight=pa.array([None, *map(float, range(9))]), town=["Ulm"] * 8 + ["Rome"] * 2))
    (work.input / "b.parquet").write_bytes(b"PAR1 cut off")
    work.write("c.parquet", people(0, 10).drop_columns(["town"]))
    (work.input / "d.parquet").touch()
    with pytest.raises(DataError) as failed:
        work.run()
    assert failed.value.message == "3 of 4 files cannot be scored; the others are"
    assert "b.parquet" in failed.value.problems[0] and "'town'" in failed.value.problems[1]
    assert failed.value.problems[2].endswith("d.parquet: empty (zero bytes)")
    assert failed.value.problems[3:] == (
        "1 row could not be scored, such as a.parquet, row 0 (from 0): column 'weight' holds null; the model needs a value "
        "there; the side table _unscored has all reasons",
        "2 values are categories that the train split does not have: town (2)",
    )
    assert not (work.out / "_penstock/manifest.json").exists()
    work.write("b.parquet", people(0, 1))
    work.write("c.parquet", people(0, 2))
    (work.input / "d.parquet").unlink()
    assert work.run().units == 2 and work.rows().num_rows == 12


def test_csv_is_read_in_the_types_of_the_model(tmp_path: Path, model: Path) -> None:
    work = Work(tmp_path, model, "csv")
    rows = people(1, 6, id=["001", "002", "003", "004", "005", "006"], kind=["?"] * 6)
    arrow_csv.write_csv(rows, work.input / "a.csv")
    (work.input / "b.csv").write_text("id,age,height,town,weight\n7,NA,2.5,Ulm,1\n8,old,2.5,Ulm,2\n")
    scored = work.run(columns=["id", "age"])
    assert (scored.rows, scored.unscored, scored.warnings[1:]) == (7, 1, [])
    found = work.rows()
    assert found["id"].to_pylist() == [*rows["id"].to_pylist(), "7"]
    assert found["age"].to_pylist() == [*rows["age"].to_pylist(), None]
    assert work.rows(side=True)["reason"].to_pylist() == ["column 'age' holds 'old', which does not read as int64"]


def test_csv_with_stray_cell_is_read_with_its_decimal_mark(tmp_path: Path) -> None:
    def source(folder: Path) -> Source:
        lines = [f"{row},5;{('no', 'yes')[row % 2]}\n" for row in range(20)]
        csv, text = {"delimiter": ";", "decimal": ",", "nulls": ["-"]}, "x;kind\n" + "".join(lines)
        steps = ["label_encoder", {"imputer": {"columns": ["x"]}}]
        return Source.of(
            folder, {"train/a.csv": text.encode()}, steps, format="csv", csv=csv, label="kind", test={"fraction": 0.4}
        )

    work = Work(tmp_path, made_model(tmp_path, source), "csv")
    (work.input / "a.csv").write_text("x;kind\n17,99;a,b\n1.5;c.d\n-;-\n20,5;NA\nNA;e\n")
    scored = work.run(columns=["x", "kind"])
    assert work.rows()["x"].to_pylist() == [17.99, None, 20.5] and work.rows()["kind"].to_pylist() == ["a,b", None, "NA"]
    reasons = [f"column 'x' holds {cell!r}, which does not read as double" for cell in ("1.5", "NA")]
    assert scored.unscored == 2 and work.rows(side=True)["reason"].to_pylist() == reasons


def test_text_is_parsed_once_and_copy_removed(tmp_path: Path, model: Path) -> None:
    work = Work(tmp_path, model, "csv")
    arrow_csv.write_csv(people(1, 6), work.input / "a.csv")
    with copies_kept() as copies, mock.patch("pyarrow.csv.open_csv", wraps=arrow_csv.open_csv) as parsed:
        work.run()
        assert parsed.call_count == 1
        assert copies.exists() and not [*copies.iterdir()]
    assert work.rows().num_rows == 6


def test_csv_without_columns_is_named(tmp_path: Path, model: Path) -> None:
    work = Work(tmp_path, model, "csv")
    (work.input / "a.csv").write_text("id,age,height,town,weight\n1,2,2.5,Ulm,1\n")
    (work.input / "b.csv").write_text("number,years\n1,2\n")
    with pytest.raises(DataError, match=r"b\.csv: .*'age'"):
        work.run()
    (work.input / "b.csv").write_text("id;age;height;town;weight\n1;2;2.5;Ulm;1\n")
    with pytest.raises(DataError, match=r"b\.csv: its columns are separated by ';'") as refused:
        work.run()
    assert refused.value.next_step.startswith("write the file as those are that the model was trained on; then run")
    (work.input / "b.csv").unlink()
    assert work.run().units == 0 and work.rows().num_rows == 1


def test_file_replaced_before_reading_is_refused(work: Work) -> None:
    for name in ("a.parquet", "b.parquet"):
        work.write(name, people(0, 10))
    asked = work.asked()
    files, output, scorer = list_input(asked.data).files, Output(Storage(str(work.out))), Scorer(packed_model(work.model))
    work.write("b.parquet", people(50, 4))
    with pytest.raises(DataError, match=r"b\.parquet"):
        score(output, asked, files, plan(output, asked, files), lambda jobs: map(scorer, jobs), silent, Scored())
    assert work.rows()["file"].unique().to_pylist() == ["a.parquet"], "rows of one file do not count as those of another"
    assert work.run().units == 1 and work.rows().num_rows == 14


class FullDisk(Storage):
    """Takes one file and has no room for the next."""

    puts = 0

    def put_file(self, local: Path, path: str) -> None:
        if self.puts:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().put_file(local, path)
        self.puts += 1


def test_full_disk_keeps_units_and_continues(work: Work) -> None:
    for name in ("a.parquet", "b.parquet", "c.parquet"):
        work.write(name, people(0, 10))
    asked = work.asked()
    files, output, scorer = list_input(asked.data).files, Output(FullDisk(str(work.out))), Scorer(packed_model(work.model))
    with pytest.raises(OSError, match="No space left"):
        score(output, asked, files, plan(output, asked, files), lambda jobs: map(scorer, jobs), silent, Scored())
    assert len(output.units()) == 1 and output.manifest() is None
    assert work.run().units == 2 and work.rows().num_rows == 30


def test_score_batch_rows_follow_bytes_and_training(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.training.registry.loaded_model.MOST_BATCH_ROWS", 64)
    loaded, given = LoadedModel(model), list[int]()

    class Counting:
        """The model, which notes how many rows it is given at once."""

        def __init__(self, model: Any) -> None:
            self._model = model

        def __getattr__(self, name: str) -> Any:
            return getattr(self._model, name)

        def predict(self, columns: Any, rows: int) -> Any:
            given.append(rows)
            return self._model.predict(columns, rows)

    monkeypatch.setattr(loaded, "_model", Counting(loaded._model))
    for batch_bytes, largest in ((1 << 20, 64), (1000, 16)):  # 16 as in training
        given.clear()
        monkeypatch.setattr("penstock.training.registry.loaded_model.BATCH_BYTES", batch_bytes)
        loaded.score(people(1, 100))
        assert (max(given), sum(given)) == (largest, 100)
    given.clear()
    row_bytes = loaded._features(given_rows(people(1, 100)))[0].nbytes // 100
    monkeypatch.setattr("penstock.training.registry.loaded_model.BATCH_BYTES", 40 * row_bytes)
    loaded.score(people(1, 100))
    assert given == [40, 40, 20]


def test_images_are_grouped_and_damaged_one_is_unscored(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = made_model(tmp_path_factory.mktemp("images"), images_source)
    work = Work(tmp_path, model)
    pictures = sorted((model.parent / "source").rglob("*.jpg"))[:6]
    for picture in pictures:
        (work.input / picture.name).write_bytes(picture.read_bytes())
    (work.input / "broken.jpg").write_bytes(pictures[0].read_bytes()[:99])
    scored = work.run()
    assert (scored.rows, scored.unscored, scored.units) == (6, 1, 1)
    assert work.rows().column_names == ["label", "path", *ADDED]
    assert sorted(work.rows()["file"].to_pylist()) == sorted(picture.name for picture in pictures)
    assert work.rows(side=True)["file"].to_pylist() == ["broken.jpg"]
    (work.input / "added.jpg").write_bytes(pictures[0].read_bytes())
    work.run()
    assert work.scored_files == ["added.jpg"]


@pytest.mark.parametrize(
    ("format", "options", "said"),
    [
        ("sql", {}, "connection: Field required"),
        ("delta", {"version": -1}, "version: Input should be greater than or equal to 0"),
        ("csv", {"delimeter": ";"}, "delimeter: Extra inputs are not permitted"),
        ("parquet", {"version": 1}, "the format parquet has no options"),
    ],
)
def test_format_option_wrong_or_missing_is_named(work: Work, format: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        ask(FetchedModel(work.model), "SELECT 1", format, [], options)
    assert said in str(refused.value) and "--option" in str(refused.value)


def test_wrong_input_output_or_column_is_named(work: Work, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"INPUT: no parquet file in .*/in"):
        work.run()
    work.write("a.parquet", people(0, 2))
    with pytest.raises(DataError, match="has no column 'towm'; did you mean 'town'") as refused:
        work.run(columns=["towm"])
    assert "--column" in refused.value.next_step
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.csv").touch()
    with pytest.raises(SpecError, match=r"mine\.csv"):
        Output(Storage(str(tmp_path / "other"))).refuse_others()
    with pytest.raises(SpecError, match="lies in INPUT"):
        check_input(str(work.input), Storage(str(work.input / "out")))
    work.write("a.parquet", people(0, 2, row=[1, 2]))
    with pytest.raises(DataError, match="has a column 'row', which is one that the output adds"):
        work.run()
