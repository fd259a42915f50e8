"""Boosted trees in whole runs: the template, the page of docs/, and kills of each library."""

from __future__ import annotations

import json
from pathlib import Path

import lightgbm
import numpy as np
import pytest
import xgboost

from penstock.flows.verbs.init import create_project
from tests import ROOT
from tests.runs.forked import Command
from tests.runs.killed import kill_worker, kill_worker_and_command, mlflow_folder, run
from tests.runs.raw_scores import check_raw_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_prefect")]

TWO = ("train.workers=2", "train.cpus_per_worker=0.5")

PARAMS = {
    "xgboost": "train.params={max_depth: 3, subsample: 0.7, colsample_bytree: 0.7}",
    "lightgbm": "train.params={num_leaves: 7, feature_fraction: 0.7, learning_rate: 0.02}",
}

LATER = """\
name: later
data: {format: csv, train: rows.csv, label: kind}
preprocess:
  - label_encoder: {column: kind}
train: {framework: xgboost, epochs: 2, start_from: model.ubj}
"""


@pytest.mark.drill
def test_the_page_of_the_docs_is_a_pipeline_that_passes_its_check(tmp_path: Path) -> None:
    file = create_project(tmp_path / "project", "boosted")[0]
    page = (ROOT / "docs" / "boosted.md").read_text(encoding="utf-8")
    file.write_text(page.split("```yaml\n")[1].split("```")[0])
    checked = Command("check", str(file), "--json").finish()
    assert checked["status"] == "done" and {"train/loss", "val/loss"} <= {*checked["batch"]["trained"]["reported"]}


def test_trees_of_classes_that_a_sample_lacks_pass_check(tmp_path: Path) -> None:
    """The sample is the first 512 rows, of two classes; the trees have three, as all rows."""
    values, codes = np.random.default_rng(1).standard_normal((900, 1)), np.repeat(np.arange(3), 300)
    trees = xgboost.train(
        {"objective": "multi:softprob", "num_class": 3}, xgboost.DMatrix(values, codes, feature_names=["x"]), 2
    )
    trees.save_model(tmp_path / "model.ubj")
    (tmp_path / "rows.csv").write_text(
        "\n".join(["x,kind", *(f"{value},{'abc'[code]}" for (value,), code in zip(values, codes, strict=True))])
    )
    file = tmp_path / "pipeline.yaml"
    file.write_text(LATER)
    checked = Command("check", str(file), "--json").finish()
    assert checked["status"] == "done"
    assert any("train.start_from does not fit a sample, which may lack classes of the label" in w for w in checked["warnings"])


@pytest.mark.drill
def test_the_tumours_are_told_apart_by_trees_and_a_killed_worker_and_driver_change_none(tmp_path: Path) -> None:
    """On two workers each. LightGBM loses one and goes on; XGBoost loses one and the command, and a second command goes on."""
    settings = {
        name: [f"train.framework={name}", params, *TWO, "train.checkpoint={every_steps: 20}", "train.epochs=300"]
        for name, params in PARAMS.items()
    }
    file = {name: create_project(tmp_path / name, "boosted")[0] for name in ("killed", *PARAMS)}
    calm = {name: run(file[name], settings[name]).finish() for name in PARAMS}
    for result in calm.values():
        assert (result["status"], result["exactness"], result["model_uri"]) == ("done", "bit-exact", "models:/tumours/1")
        assert result["metrics"]["test/accuracy"] >= 0.93 and result["metrics"]["test/auroc"] >= 0.98
    kept = {path.name: path for path in file["xgboost"].parent.glob(".penstock/mlflow/artifacts/**/evaluation/*")}
    assert {"test-confusion_matrix.png", "test-roc.png", "feature_importance.png"} <= kept.keys()
    assert len(json.loads(kept["feature_importance.json"].read_text())["column"]) == 30
    for name in PARAMS:
        check_raw_rows(file[name], calm[name])
    again = run(file["xgboost"], settings["xgboost"]).finish()
    assert {stage["outcome"] for stage in again["stages"]} == {"reused"}
    assert again["weights_digest"] == calm["xgboost"]["weights_digest"]
    of_a_step = Command("rows", again["run"], "--step", "5", "--file", str(file["xgboost"]), "--json").finish(2)
    assert "a step is a round" in of_a_step["error"]["message"]

    command = run(file["killed"], settings["lightgbm"])
    kill_worker(command, file["killed"])
    ended = {"lightgbm": command.finish()}
    command = run(file["killed"], settings["xgboost"])
    kill_worker_and_command(command, file["killed"])
    ended["xgboost"] = run(file["killed"], settings["xgboost"]).finish()
    assert (ended["lightgbm"]["attempt"], ended["xgboost"]["attempt"]) == (1, 2)
    for name in ("xgboost", "lightgbm"):
        assert (ended[name]["status"], ended[name]["exactness"]) == ("done", "bit-exact")
        assert ended[name]["weights_digest"] == calm[name]["weights_digest"] and ended[name]["metrics"] == calm[name]["metrics"]
    artifacts = {name: mlflow_folder(file[name], "tumours") / "artifacts" for name in ended}
    assert xgboost.Booster(model_file=artifacts["xgboost"] / "model.ubj").num_boosted_rounds() > 20
    assert lightgbm.Booster(model_file=artifacts["lightgbm"] / "model.txt").num_trees() > 20
