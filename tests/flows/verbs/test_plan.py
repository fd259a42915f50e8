"""What a plan says of a project that was never run; the plans of real runs are looked at where those runs are."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.plan import describe_mixing, plan_pipeline, show_plan
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.schema import FeedSchema
from penstock.tasks.project import Project
from tests.drills.project import make_project

PREPARED = DatasetManifest(
    key="k", feed_schema=FeedSchema(columns=()), rows={"train": 1442}, shards=(), units=(), content_digest="c"
)
WINDOWED = ["shuffle.mode=windowed", "shuffle.window_rows=3200", "train.batch_rows=64"]


@pytest.mark.parametrize(
    ("more", "like_rows"),
    [
        ([], pytest.approx(21.4, abs=1)),  # 64 rows out of 32 runs
        (["shuffle.window_of=shards"], pytest.approx(1, abs=0.1)),
        (["materialize.cache=none"], pytest.approx(1, abs=0.1)),
    ],
)
def test_a_plan_says_what_a_window_costs_in_mixing(tmp_path: Path, more: list[str], like_rows: float) -> None:
    plan = plan_pipeline(make_project(tmp_path / "p", files=1), [*WINDOWED, *more])
    (shuffle,) = [stage for stage in plan["stages"] if stage["name"] == "shuffle"]
    assert shuffle["mixing"] == {"batch_rows": 64, "like_rows": like_rows, "rows_known": False}
    said = io.StringIO()
    show_plan(plan, Console(file=said, width=120))
    expected = f"a batch of 64 out of a window tells as much as at least about {shuffle['mixing']['like_rows']:.0f} rows"
    assert expected in said.getvalue()


def test_a_full_shuffle_costs_nothing_and_nothing_is_said(tmp_path: Path) -> None:
    plan = plan_pipeline(make_project(tmp_path / "p", files=1), [])
    assert [stage["action"] for stage in plan["stages"]] == ["run"] * 7
    assert [stage["mixing"] for stage in plan["stages"] if "mixing" in stage] == [None]


def test_a_window_of_all_prepared_rows_costs_nothing(tmp_path: Path) -> None:
    loaded = load_spec(make_project(tmp_path / "p", files=1), WINDOWED)
    mixing = describe_mixing(Project(loaded.spec, loaded.base_dir, loaded.origins), PREPARED.model_dump())
    assert mixing == {"batch_rows": 64, "like_rows": 64, "rows_known": True}
