"""When is a recorded dataset believed? By its shards on disk, and otherwise by what still has to read it."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from flows.cpus import cpus_needed, cpus_refused
from flows.spec_file import load_spec
from ingest.dataset import DatasetManifest, FeedSchema
from ingest.materialize import materialize
from ingest.parallel import local_map
from ingest.spec import MaterializeSpec
from penstock.progress import silent
from tasks.materialize import STAGE
from tasks.project import Project
from tasks.stage import Look
from tests.drills.project import make_project
from tests.ingest.preparing import Source


def project(tmp_path: Path, *overrides: str) -> Project:
    loaded = load_spec(make_project(tmp_path / "project", files=1), ["shuffle.mode=windowed", *overrides])
    return Project(loaded.spec, loaded.base_dir, loaded.origins)


def output() -> dict[str, Any]:
    schema = FeedSchema(columns=())
    manifest = DatasetManifest(key="k", feed_schema=schema, rows={"train": 5}, shards=(), units=(), content_digest="c")
    return manifest.model_dump(mode="json")


PENGUINS = {
    "whole": ["Adelie", "Gentoo"] * 20,
    "misspelt": ["Adelie", "Gentoo"] * 20 + ["Adelei"],
    "many": [f"kind {number:02d}" for number in range(15) for _ in range(number + 1)],
}


@pytest.mark.parametrize(
    ("train", "test", "said"),
    [
        ("whole", ["Adelie", "Gentoo"], ""),
        ("misspelt", None, ""),
        (
            "misspelt",
            ["Gentoo", "Adelie"],
            r"1 of 3 classes of 'species' has no row in validation or test.*: 'Adelei' \(1 row\);",
        ),
        ("many", ["kind 14"], r"14 of 15 classes .*: 'kind 00' \(1 row\), 'kind 01' \(2 rows\), .* and 4 more;"),
    ],
)
def test_classes_are_shown_and_those_that_only_train_has_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: str, test: list[str] | None, said: str
) -> None:
    files = {"train/a.parquet": pa.table({"species": PENGUINS[train]})}
    if test is not None:
        files["test/a.parquet"] = pa.table({"species": test})
    steps = [{"label_encoder": {"column": "species"}}]
    source = Source.of(tmp_path, files, steps, label="species", **({"test": "test"} if test else {}))
    spec = SimpleNamespace(data=source.data, preprocess=source.steps, materialize=MaterializeSpec())
    warned: list[str] = []
    ctx: Any = SimpleNamespace(
        project=SimpleNamespace(spec=spec, storage=source.storage, transforms={}),
        storage=source.storage,
        keys={"materialize": SimpleNamespace(key="k")},
        fitted=source.fit(),
        snapshot=source.snapshot(),
        reporter=SimpleNamespace(progress=lambda stage: silent),
        need_ray=lambda: None,
        warn=warned.append,
    )
    monkeypatch.setattr("tasks.materialize.materialize_dataset", partial(materialize, parallel=local_map))
    found, _ = STAGE.run(ctx)
    if said:
        (warning,) = warned
        assert re.search(said, warning)
    else:
        assert warned == []
    shown = dict(STAGE.facts(found))["classes"]
    assert (
        shown
        == {
            "whole": "Adelie 20, Gentoo 20",
            "misspelt": "Adelie 20, Gentoo 20, Adelei 1",
            "many": ", ".join(f"kind {number:02d} {number + 1}" for number in range(14, 4, -1)) + " and 5 more",
        }[train]
    )


@pytest.mark.parametrize(
    ("cache", "will_train", "doubted"), [("memory", True, True), ("memory", False, False), ("none", True, False)]
)
def test_rows_in_memory_are_prepared_again_only_for_training(
    tmp_path: Path, cache: str, will_train: bool, doubted: bool
) -> None:
    look = Look(project(tmp_path, f"materialize.cache={cache}"), "run", deep=will_train, will_train=will_train)
    doubt = STAGE.distrust(look, output())
    assert (doubt is not None) == doubted
    if doubt is not None:
        assert "cache: memory" in doubt


def test_only_streams_need_cpus_beside_the_workers(tmp_path: Path) -> None:
    four = ["train.workers=4", "train.batch_rows=64", "train.cpus_per_worker=1"]
    for cache in ("disk", "memory"):
        assert cpus_refused(project(tmp_path / cache, f"materialize.cache={cache}", *four).spec, 4.0) is None
    streaming = project(tmp_path / "none", "materialize.cache=none", *four).spec
    refusal = cpus_refused(streaming, 5.0)
    assert refusal is not None
    assert "need 6 CPUs" in refusal.message
    assert "materialize.cache: disk or memory" in refusal.next_step
    assert cpus_refused(streaming, cpus_needed(streaming)) is None
