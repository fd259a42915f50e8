"""Boosted trees in whole runs: the template, the page of docs/, and kills of each library."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.flows.verbs.init import create_project
from tests import ROOT
from tests.drills.project import Command
from tests.runs.raw_scores import check_raw_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_prefect")]

PARAMS = {
    "xgboost": "train.params={max_depth: 3, subsample: 0.7, colsample_bytree: 0.7}",
    "lightgbm": "train.params={num_leaves: 7, feature_fraction: 0.7, learning_rate: 0.02}",
}


def test_the_page_of_the_docs_is_a_pipeline_that_passes_its_check(tmp_path: Path) -> None:
    file = create_project(tmp_path / "project", "boosted")[0]
    page = (ROOT / "docs" / "boosted.md").read_text(encoding="utf-8")
    file.write_text(page.split("```yaml\n")[1].split("```")[0])
    (file.parent / "objective.py").write_text(page.split("```python\n")[1].split("```")[0])
    checked = Command("check", str(file), "--json", "--set", "train.recipe=objective.py:focal").finish()
    assert (checked["status"], checked["batch"]["predict_shape"], list(checked["ships"])) == ("done", [2], ["objective.py"])


@pytest.mark.drill
def test_the_tumours_are_told_apart_by_trees_once(tmp_path: Path) -> None:
    file = create_project(tmp_path / "project", "boosted")[0]
    result = Command("run", str(file), "--json").finish()
    assert (result["status"], result["exactness"], result["model_uri"]) == ("done", "bit-exact", "models:/tumours/1")
    assert result["metrics"]["test/accuracy"] >= 0.93 and result["metrics"]["test/auroc"] >= 0.98
    found = {path.name: path for path in file.parent.glob(".penstock/mlflow/artifacts/**/evaluation/*")}
    assert {"test-confusion_matrix.png", "test-roc.png", "feature_importance.png"} <= found.keys()
    assert len(json.loads(found["feature_importance.json"].read_text())["column"]) == 30
    check_raw_rows(file, result)
    again = Command("run", str(file), "--json").finish()
    assert {stage["outcome"] for stage in again["stages"]} == {"reused"}
    assert again["weights_digest"] == result["weights_digest"]


def run_folder(file: Path) -> Path:
    (folder,) = (file.parent / ".penstock" / "runs").iterdir()
    return folder


def workers(folder: Path) -> dict[str, int]:
    newest = max((folder / "attempts").iterdir())
    found: dict[str, Any] = json.loads(newest.read_text())["workers"]
    return {rank: int(place.rsplit(":", 1)[1]) for rank, place in found.items()}


def newest_step(folder: Path) -> int:
    return max((int(path.parent.name.split("-")[1]) for path in folder.glob("checkpoints/*/manifest.json")), default=0)


@pytest.mark.drill
@pytest.mark.parametrize("framework", sorted(PARAMS))
def test_a_killed_worker_and_a_killed_driver_change_no_tree(tmp_path: Path, framework: str) -> None:
    settings = [f"train.framework={framework}", PARAMS[framework], "train.checkpoint={every_steps: 20}", "train.epochs=400"]
    words = [word for setting in settings for word in ("--set", setting)]
    calm = Command("run", str(create_project(tmp_path / "calm", "boosted")[0]), "--json", *words).finish()
    file = create_project(tmp_path / "killed", "boosted")[0]
    command = Command("run", str(file), "--json", *words)
    command.wait_for("a run", lambda: any((file.parent / ".penstock" / "runs").glob("*/checkpoints/*/manifest.json")))
    folder = run_folder(file)
    os.kill(workers(folder)["1"], signal.SIGKILL)
    first = newest_step(folder)
    command.wait_for("the workers to go on", lambda: newest_step(folder) >= first + 40)
    command.kill()
    assert newest_step(folder) < 400, "the kill came too late"
    ended = Command("run", str(file), "--json", *words).finish()
    assert (ended["attempt"], ended["status"], ended["exactness"]) == (2, "done", "bit-exact")
    assert ended["weights_digest"] == calm["weights_digest"] and ended["metrics"] == calm["metrics"]
