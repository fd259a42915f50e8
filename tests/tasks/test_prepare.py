"""When is a recorded dataset believed? By its shards on disk, and otherwise by what still has to read it."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import yaml

from penstock.errors import DataError
from penstock.flows.preflight.cpus import cpus_needed, workers_refused
from penstock.flows.spec_file import load_spec
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.ray_tasks import local_map
from penstock.ingest.schema import FeedSchema
from penstock.ingest.spec import MaterializeSpec
from penstock.progress import silent
from penstock.tasks import prepare as tasks_prepare
from penstock.tasks.context import RunContext, StageOutcome
from penstock.tasks.prepare import MATERIALIZE, READ
from penstock.tasks.project import Project
from penstock.tasks.records.ledger import Ledger
from penstock.tasks.stage import VerifyContext
from penstock.training.tracking.tracker import Tracker
from tests.drills.project import make_project
from tests.ingest.preparing import Source
from tests.ingest.reading import listed


def project(tmp_path: Path, *overrides: str) -> Project:
    loaded = load_spec(make_project(tmp_path / "project", files=1), ["shuffle.mode=windowed", *overrides])
    return loaded.project


def output() -> dict[str, Any]:
    schema = FeedSchema(columns=())
    manifest = DatasetManifest(key="k", feed_schema=schema, rows={"train": 5}, content_digest="c")
    return manifest.model_dump(mode="json")


def prepared(source: Source, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    """What the stage shows as classes when it prepares `source`, and what it warns of."""
    spec = SimpleNamespace(data=source.data, preprocess=source.steps, materialize=MaterializeSpec(), overlaps=False)
    warned: list[str] = []
    ctx: Any = SimpleNamespace(
        project=SimpleNamespace(spec=spec, storage=source.storage, transforms=source.code),
        storage=source.storage,
        ledger=Ledger(source.storage),
        keys={"materialize": SimpleNamespace(key="k")},
        fitted=source.fit(),
        snapshot=source.snapshot(),
        reporter=SimpleNamespace(progress=lambda stage: silent),
        need_ray=lambda: None,
        parallel=lambda _stage: local_map,
        warn=warned.append,
    )
    found, _ = MATERIALIZE.run(ctx)
    shown = dict(MATERIALIZE.facts(found))
    assert shown == dict(MATERIALIZE.facts(json.loads(json.dumps(found, sort_keys=True))))  # as it is read from its record
    return shown.get("classes", ""), warned


PENGUINS = ["Adelie", "Gentoo"] * 20
MANY = [number for number in range(15) for _ in range(number + 1)]


@pytest.mark.parametrize(
    ("train", "held_out", "shown", "said"),
    [
        (PENGUINS, {"test": ["Gentoo", "Adelie"]}, "'Adelie': 20, 'Gentoo': 20", ""),
        (PENGUINS, {"validation": ["Gentoo"], "test": ["Adelie"]}, "'Adelie': 20, 'Gentoo': 20", ""),
        ([*PENGUINS, "Adelei"], {}, "'Adelie': 20, 'Gentoo': 20, 'Adelei': 1", ""),
        (
            [*PENGUINS, "Adelei\n" + 99 * "i"],
            {"test": ["Gentoo", "Adelie"]},
            rf"'Adelie': 20, 'Gentoo': 20, 'Adelei\n{48 * 'i'}...: 1",
            "materialize: 1 of 3 classes of 'y' has no row in validation or test, so that no metric covers it: "
            rf"'Adelei\n{48 * 'i'}... (1 row); correct misspelt classes at their source",
        ),
        (
            MANY,
            {"test": [14]},
            ", ".join(f"{number}: {number + 1}" for number in range(14, 4, -1)) + " and 5 more",
            "materialize: 14 of 15 classes of 'y' have no row in validation or test, so that no metric covers them: 0 (1 row), "
            + ", ".join(f"{number} ({number + 1} rows)" for number in range(1, 10))
            + " and 4 more; correct wrong labels at their source; if 'y' is a quantity, cast: {y: float32}",
        ),
        ([0.5, 1.5], {"test": [2.5]}, "", ""),
    ],
    ids=["all tried", "in validation or test", "nothing held out", "misspelt", "numbers", "a quantity"],
)
def test_classes_of_train_alone_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: list[Any], held_out: dict[str, list[Any]], shown: str, said: str
) -> None:
    splits = {"train": train, **held_out}
    # No row of one split is in another: that would be reported, too.
    files = {
        f"{split}/a.parquet": pa.table({"y": rows, "x": [1000.0 * at + row for row in range(len(rows))]})
        for at, (split, rows) in enumerate(splits.items())
    }
    steps = ["label_encoder"] if isinstance(train[0], str) else []
    source = Source.of(tmp_path, files, steps, label="y", **{split: split for split in held_out})
    assert prepared(source, monkeypatch) == (shown, [said] if said else [])


@pytest.mark.parametrize("labels", [[0.0, 1.0], [0.0, 1.0, 2.0]])
def test_label_of_whole_floats_is_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: list[float]) -> None:
    table = pa.table({"y": labels * 20, "x": [row + 0.5 for row in range(20 * len(labels))]})
    (said,) = prepared(Source.of(tmp_path / "floats", {"train/a.parquet": table}, [], label="y"), monkeypatch)[1]
    assert said.startswith("materialize: the label 'y' holds whole numbers only (0, 1") and "regression" in said
    whole = table.set_column(0, "y", table["y"].cast(pa.int64()))
    as_quantity = Source.of(tmp_path / "cast", {"train/a.parquet": whole}, [{"cast": {"y": "float32"}}], label="y")
    assert not prepared(as_quantity, monkeypatch)[1]


def test_columns_that_a_file_lacks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"y": [0.5, 1.5]}
    files = {f"train/{night}.parquet": pa.table({**rows, "age": [at, at + 0.5]}) for at, night in enumerate("abc")}
    files["train/d.parquet"] = pa.table({**rows, "Age": [7.0, 8.0]})
    source = Source.of(tmp_path, files, [{"imputer": {"columns": "*"}}], label="y", missing_columns="null")
    assert prepared(source, monkeypatch)[1] == [
        "materialize: null because the file has no such column: 'Age' in 6 rows of 3 files (first a.parquet), "
        "'age' in 2 rows of d.parquet; where one was renamed, give it its old name again"
    ]


@pytest.mark.parametrize("name", ["Unnamed: 0", "__index_level_0__"])
def test_pandas_index_column_is_warned_of_unless_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rows = {name: [0, 1, 2], "Unnamed: 1": ["a", "b", "a"], "x": [5, 6, 7], "y": [0.5, 1.5, 2.5]}
    files = {"train/a.parquet": pa.table(rows)}
    kept, left_out = ({"drop": columns} for columns in (["Unnamed: 1"], ["Unnamed: 1", name]))
    (said,) = prepared(Source.of(tmp_path / "kept", files, [kept], label="y"), monkeypatch)[1]
    assert said.startswith(f"materialize: column {name!r} is the number of the row")
    assert yaml.safe_load(said.partition("preprocess: ")[2]) == [{"drop": [name]}]
    assert not prepared(Source.of(tmp_path / "left out", files, [left_out], label="y"), monkeypatch)[1]


def test_label_of_one_class_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"train/a.parquet": pa.table({"x": [1.0, 2.0], "y": ["bad", "bad"]})}
    source = Source.of(tmp_path, rows, [{"label_encoder": {"column": "y"}}], label="y")
    with pytest.raises(DataError, match="the label 'y' has one class, 'bad', in all 2 rows of train"):
        prepared(source, monkeypatch)


def test_class_names_come_from_label_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"city": ["Riga", "Oslo"] * 6, "kind": ["a", "b", "c"] * 4, "y": list(range(12))})
    cities = {"label_encoder": {"column": "city"}}

    def shown(folder: str, steps: list[Any], label: str) -> str:
        return prepared(Source.of(tmp_path / folder, {"train/a.parquet": table}, steps, label=label), monkeypatch)[0]

    assert (
        shown("feature", [cities, {"drop": ["kind"]}], "y") == ", ".join(f"{number}: 1" for number in range(10)) + " and 2 more"
    )
    both = [cities, {"label_encoder": {"column": "kind"}}, {"drop": ["y"]}]
    assert shown("two", both, "kind") == "'a': 4, 'b': 4, 'c': 4"
    (tmp_path / "numbered").mkdir()
    (tmp_path / "numbered" / "code.py").write_text("def f(batch):\n    return {'city': batch['city'] + 10}\n")
    assert shown("numbered", [{"drop": ["kind", "y"]}, cities, {"map_batches": "code.py:f"}], "city") == "10: 6, 11: 6"


def test_unseen_one_hot_values_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "train/a.parquet": pa.table({"c": ["red", "blue"]}),
        "test/a.parquet": pa.table({"c": ["violet", "red", "violet"]}),
    }
    source = Source.of(tmp_path, files, [{"one_hot": {"columns": ["c"]}}], test="test")
    zeros = "materialize: values that train does not have (unknown: ignore or code), by column: {'c': 2}"
    shared = (
        f"materialize: 1 of 3 rows of test are in train, too; the first: {tmp_path}/test/a.parquet, row 1 (from 0) is "
        f"{tmp_path}/train/a.parquet, row 0 (from 0), so the model is judged on rows it has seen"
    )
    assert prepared(source, monkeypatch) == ("", [zeros, shared])


@pytest.mark.parametrize(
    ("cache", "will_train", "doubted"), [("memory", True, True), ("memory", False, False), ("none", True, False)]
)
def test_rows_in_memory_are_prepared_again_only_for_training(
    tmp_path: Path, cache: str, will_train: bool, doubted: bool
) -> None:
    context = VerifyContext(project(tmp_path, f"materialize.cache={cache}"), "run", deep=will_train, will_train=will_train)
    problem = MATERIALIZE.verify(context, output())
    assert (problem is not None) == doubted
    if problem is not None:
        assert "cache: memory" in problem


def test_only_streams_need_cpus_beside_the_workers(tmp_path: Path) -> None:
    four = ["train.workers=4", "train.batch_rows=64", "train.cpus_per_worker=1"]
    for cache in ("disk", "memory"):
        assert workers_refused(project(tmp_path / cache, f"materialize.cache={cache}", *four).spec, [{"CPU": 4.0}]) is None
    streaming = project(tmp_path / "none", "materialize.cache=none", *four).spec
    refusal = workers_refused(streaming, [{"CPU": 4.0}])
    assert refusal is not None
    assert "need 4.5 CPUs" in refusal.message
    assert "materialize.cache: disk or memory" in refusal.next_step
    assert workers_refused(streaming, [{"CPU": cpus_needed(streaming)}]) is None
    early = project(tmp_path / "early", "data.validation=null", "materialize.overlap=true", *four).spec
    refusal = workers_refused(early, [{"CPU": 4.0}])
    assert refusal is not None and "need 5 CPUs" in refusal.message and "without overlap" in refusal.next_step
    assert workers_refused(early, [{"CPU": cpus_needed(early)}]) is None


def test_files_of_reused_read_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source.of(tmp_path / "here", {f"train/{name}.parquet": pa.table({"x": [1.0, 2.0]}) for name in "abc"})
    recorded = json.loads(json.dumps(source.snapshot().model_dump(mode="json")))
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    made: list[str] = []
    real = SourceFile.unchecked.__func__  # type: ignore[attr-defined]
    counted = classmethod(lambda cls, **fields: made.append(fields["uri"]) or real(cls, **fields))
    for folder, times in ((source.folder, 1), (tmp_path / "there", 2)):
        ctx = object.__new__(RunContext)
        ctx.project = SimpleNamespace(files=listed(source.data, folder))  # type: ignore[assignment]
        monkeypatch.setattr(SourceFile, "unchecked", counted)
        ctx.outcomes = {"read": StageOutcome("read", "k", "reused", 0.0, recorded, READ.facts(recorded))}
        assert [file.uri for file in ctx.snapshot.files] == [str(folder / f"train/{name}.parquet") for name in "abc"]
        assert ctx.snapshot is ctx.snapshot
        monkeypatch.undo()
        assert len(made) == 3 * times  # those that have moved are copied with their new address
        made.clear()


def test_read_facts_count_files_and_name_versions() -> None:
    files = {"name": ["a", "b"], "size_bytes": [10**6, 10**5], "rows": [3, 1000], "state": ["version-12", ""]}
    facts = READ.facts({"format": "delta", "files": files, "columns": [{"name": "x", "type": "double"}]})
    assert facts == (("delta", "version 12"), ("rows", "1,003"), ("files", "2"), ("size", "1.1 MB"), ("columns", "x: double"))


@pytest.mark.parametrize(("most", "lines"), [(2, 12), (1, 1)])
def test_tracked_files_hide_secrets_and_many_are_compact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, lines: int
) -> None:
    monkeypatch.setattr(tasks_prepare, "MAX_FILES", most)
    rows = pa.table({"x": [1.0, 2.0]})
    source = Source.of(tmp_path, {f"train/sig={name}/a.parquet": rows for name in ("canary", "bird")}, [{"drop": ["sig"]}])
    sent: dict[str, bytes] = {}
    tracker: Any = SimpleNamespace(log_figure=sent.__setitem__, log_dataset=lambda *_, **__: None, set_tags=lambda tags: None)
    tracker.log_text, tracker.log_json = partial(Tracker.log_text, tracker), partial(Tracker.log_json, tracker)
    manifest = source.materialize()
    ctx: Any = SimpleNamespace(
        project=SimpleNamespace(spec=SimpleNamespace(data=source.data)),
        run=SimpleNamespace(pipeline="p"),
        ledger=Ledger(source.storage),
        fitted=source.fit(),
        snapshot=source.snapshot(),
        storage=source.storage,
        tracker=tracker,
        shown=frozenset(),
    )
    MATERIALIZE.publish(ctx, manifest.model_dump(mode="json"))
    text = sent["data/files.json"].decode()
    assert "canary" not in text and "sig=***" in text
    assert len(text.splitlines()) == lines
