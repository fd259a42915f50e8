"""A name for a run that is not there is answered with what is there, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import SpecError
from penstock.flows.history.comparison import _describe_metric, _notable
from penstock.flows.history.metrics import better_sign, is_better, main_metric
from penstock.flows.history.which_run import RunNames
from penstock.storage import Storage
from penstock.tasks.records.ledger import Ledger, Run
from tests.drills.project import make_project


@pytest.mark.parametrize("name", ["last", "previous", "best"])
def test_missing_run_by_order_counts_runs(tmp_path: Path, name: str) -> None:
    file = make_project(tmp_path / "project", files=1)
    with pytest.raises(SpecError, match=rf"there is no run '{name}' with the records .*, which has 0 runs\n") as found:
        RunNames(file).find(name)
    assert "penstock run" in found.value.next_step
    with pytest.raises(SpecError) as found:
        RunNames(file).find(str(file))
    assert found.value.next_step == f"name the pipeline by --file {file}"


@pytest.mark.parametrize("given", [None, Path()])
def test_run_names_are_of_pipeline_and_ids_of_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Path | None
) -> None:
    monkeypatch.chdir(make_project(tmp_path / "project", files=1).parent)
    ledger = Ledger(Storage(".penstock"))
    for name, pipeline, day in [("drill-a", "drill", 1), ("other-a", "other", 2), ("other-b", "other", 3)]:
        ledger.save_run(Run(run=name, pipeline=pipeline, created=f"2026-01-0{day}T00:00:00+00:00", spec={"name": pipeline}))
    names = RunNames(given)
    assert [names.find(name).run for name in ("last", "drill", "other-a")] == ["drill-a", "drill-a", "other-a"]
    with pytest.raises(SpecError, match="which has 1 run"):
        names.find("previous")
    Path("pipeline.yaml").unlink()
    with pytest.raises(SpecError, match="'other' is a part of 2 runs") as told:
        RunNames(None).find("other")
    assert told.value.next_step == "name one of them by its whole id"


def test_names_by_order_pass_over_runs_without_records(tmp_path: Path) -> None:
    file = make_project(tmp_path / "project", files=1)
    ledger = Ledger(Storage(str(file.parent / ".penstock")))
    for day, accuracy in enumerate((0.9, 0.8, 0.7, None), 1):
        metrics = {} if accuracy is None else {"metrics": {"test/accuracy": accuracy}}
        name = f"2026-01-0{day}T00:00:00+00:00"
        ledger.save_run(Run(run=f"r-{day}", pipeline="drill", created=name, spec={"name": "drill"}, result=metrics))
    names = RunNames(file)
    assert names.find("best").run == "r-1"
    found = [names.find(name, lambda run: bool(run.result.get("metrics"))).run for name in ("previous", "last")]
    assert found == ["r-2", "r-3"]
    assert [names.find(name).run for name in ("previous", "last")] == ["r-3", "r-4"]


@pytest.mark.parametrize(
    ("metrics", "metric", "sign"),
    [
        ({"val/auroc": 0.9, "test/auroc": 0.8, "test/accuracy": 0.7}, "test/auroc", 1),
        ({"val/auroc": 0.9, "test/accuracy": 0.7}, "val/auroc", 1),
        ({"test/loss": 0.9}, "test/loss", -1),
        ({}, None, 0),
    ],
)
def test_runs_are_compared_on_test_rows(metrics: dict[str, float], metric: str | None, sign: int) -> None:
    best = {"metric": "val/auroc", "mode": "max"}
    spec = {"train": {"checkpoint": {"best": best}}}
    run = Run(run="r", pipeline="p", created="", spec=spec, result={"metrics": metrics})
    assert main_metric(run) == metric
    assert metric is None or better_sign(run, metric) == sign


def test_value_of_unknown_direction_is_neither_better_nor_worse() -> None:
    run = Run(run="r", pipeline="p", created="", spec={"train": {}})
    found = [is_better(run, f"test/{name}", -0.5) for name in ("largest", "loss", "accuracy")]
    assert found == [None, True, False] and is_better(run, "test/loss", 0.0) is None


def test_equal_metric_has_no_interval() -> None:
    paired = {"metric": "accuracy", "difference": 0.0, "low": 0.0, "high": 0.0, "sure": False}
    compared = {
        "main_metric": "test/accuracy",
        "metrics": [{"metric": "test/accuracy", "before": 1.0, "after": 1.0, "difference": 0.0, "better": None}],
        "same_rows": [{"split": "test", "rows": 177, "metrics": [paired]}],
    }
    assert _describe_metric(compared) == ["test/accuracy is the same: 1.0000."]


@pytest.mark.parametrize(("better", "sure_worse", "lines"), [(False, True, 3), (False, None, 2), (True, None, 2)])
def test_fall_of_quality_and_drift_are_looked_at(better: bool, sure_worse: bool | None, lines: int) -> None:
    apart = -0.1 if not better else 0.1
    paired = {"metric": "accuracy", "difference": apart, "low": -0.2, "high": 0.2, "sure": bool(sure_worse)}
    column = {"column": "age", "kind": "numbers", "drifted": True, "summary": "mean 1 -> 9"}
    added = {"name": "train/b.csv", "what": "added", "rows": 9, "rows_before": None, "classes": {"yes": 9}}
    share = {"split": "train", "class": "yes", "share_before": 0.5, "share_after": 0.5, "drifted": False}
    compared = {
        "main_metric": "test/accuracy",
        "metrics": [{"metric": "test/accuracy", "before": 0.9, "after": 0.9 + apart, "difference": apart, "better": better}],
        "same_rows": [{"split": "test", "rows": 177, "metrics": [paired | {"better": False if sure_worse else None}]}],
        "data": {"files": [added], "classes": [share], "columns": [column]},
    }
    found = _notable(compared)
    assert len(found) == lines and found[-1] == "Column 'age' has drifted: mean 1 -> 9."
    assert "100.0% of class 'yes', where the rows before had 50.0%" in found[-2]
