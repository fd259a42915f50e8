"""Boosted trees in whole runs: the template, the page of docs/, and kills of each library."""

from __future__ import annotations

import json
from pathlib import Path

import mlflow
import mlflow.lightgbm
import mlflow.xgboost
import pytest

from penstock.flows.verbs.init import create_project
from tests import ROOT
from tests.drills.project import Command
from tests.runs.killed import calm_and_killed, mlflow_folder
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


@pytest.mark.drill
@pytest.mark.parametrize("framework", sorted(PARAMS))
def test_a_killed_worker_and_a_killed_driver_change_no_tree(tmp_path: Path, framework: str) -> None:
    settings = [f"train.framework={framework}", PARAMS[framework], "train.checkpoint={every_steps: 20}", "train.epochs=400"]
    calm, ended = calm_and_killed(tmp_path, lambda folder: create_project(folder, "boosted")[0], settings, ahead=40)
    assert (ended["attempt"], ended["status"], ended["exactness"]) == (2, "done", "bit-exact")
    assert ended["weights_digest"] == calm["weights_digest"] and ended["metrics"] == calm["metrics"]
    # MLflow's own flavour beside penstock's: the library's trees, which take prepared rows.
    folder = str(mlflow_folder(tmp_path / "killed" / "pipeline.yaml", "tumours"))
    trees = {"xgboost": mlflow.xgboost, "lightgbm": mlflow.lightgbm}[framework].load_model(folder)
    rounds = trees.num_boosted_rounds() if framework == "xgboost" else trees.num_trees()
    assert type(trees).__name__ == "Booster" and rounds > 20
