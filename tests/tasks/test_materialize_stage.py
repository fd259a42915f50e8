"""When is a recorded dataset believed? By its shards on disk, and otherwise by what still has to read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.cpus import cpus_needed, cpus_refused
from flows.spec_file import load_spec
from ingest.dataset import DatasetManifest, FeedSchema
from tasks.materialize import STAGE
from tasks.project import Project
from tasks.stage import Look
from tests.drills.project import make_project


def project(tmp_path: Path, *overrides: str) -> Project:
    loaded = load_spec(make_project(tmp_path / "project", files=1), ["shuffle.mode=windowed", *overrides])
    return Project(loaded.spec, loaded.base_dir, loaded.origins)


def output() -> dict[str, Any]:
    schema = FeedSchema(columns=())
    manifest = DatasetManifest(key="k", feed_schema=schema, rows={"train": 5}, shards=(), units=(), content_digest="c")
    return manifest.model_dump(mode="json")


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
