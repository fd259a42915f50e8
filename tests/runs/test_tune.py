"""`penstock tune` on a real project: trials in one cluster, runs below one, and a best spec that is trained already."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow.tracking import MlflowClient

from penstock.flows.verbs.init import create_project
from tests import ROOT
from tests.runs.forked import Command
from tests.shared import made_once

pytestmark = [pytest.mark.drill, pytest.mark.usefixtures("shared_prefect")]

SMALL = [word for text in ("tune.trials=3", "train.workers=1", "train.epochs=4") for word in ("--set", text)]


def sweep(prefect_url: str, folder: Path) -> dict[str, Any]:
    """The template with the example of docs/tune.md, and fewer, shorter trials."""
    file = create_project(folder / "project", "tabular")[0].with_name("pipeline.yaml")
    example = (ROOT / "docs" / "tune.md").read_text().split("```yaml\n")[1].split("```")[0]
    file.write_text(file.read_text() + example)
    return Command("tune", str(file), "--json", *SMALL, environment={"PREFECT_API_URL": prefect_url}).finish()


@pytest.fixture(scope="session")
def swept(tmp_path_factory: pytest.TempPathFactory, prefect_url: str) -> tuple[Path, dict[str, Any]]:
    """The pipeline file of a sweep of three trials, and what `penstock tune --json` said."""
    folder, said = made_once(tmp_path_factory, "swept", partial(sweep, prefect_url))
    return folder / "project" / "pipeline.yaml", said


def test_best_trial_is_registered(swept: tuple[Path, dict[str, Any]]) -> None:
    _, said = swept
    assert [trial["state"] for trial in said["trials"]] == ["done"] * 3
    best = min(said["trials"], key=lambda trial: trial["value"])
    assert said["best"]["trial"] == best["number"]
    assert said["weights_digest"] == best["weights_digest"]
    assert said["model_uri"] == "models:/diagnosis/1", "one version, and not one for each trial"
    assert {stage["name"]: stage["outcome"] for stage in said["stages"]}["train"] == "reused"


def test_trials_share_rows_and_are_runs_below_the_sweep(swept: tuple[Path, dict[str, Any]]) -> None:
    file, said = swept
    assert len(list(file.parent.glob(".penstock/datasets/*/manifest.json"))) == 1
    client = MlflowClient(f"sqlite:///{file.parent}/.penstock/mlflow/mlflow.db")
    parent = client.get_run(said["mlflow_run_id"])
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["mlflow.note.content"].startswith("3 trials (3 done); the best is trial ")
    tracked = {run["run"]: run["mlflow_run_id"] for run in Command("status", str(file), "--json").finish()["runs"]}
    for trial in said["trials"]:
        run = client.get_run(tracked[trial["run"]])
        assert run.data.tags["mlflow.parentRunId"] == said["mlflow_run_id"]
        for key in ("train.learning_rate", "train.params.hidden"):
            assert run.data.params[key] == str(trial["values"][key]), "an axis of a parallel coordinates plot"
        assert run.data.metrics["objective"] == pytest.approx(trial["value"])
        assert run.info.status == "FINISHED"


def test_best_spec_reuses_its_training(swept: tuple[Path, dict[str, Any]]) -> None:
    file, said = swept
    best = yaml.safe_load(Path(said["file"]).read_text())
    assert "tune" not in best
    assert best["train"]["learning_rate"] == said["best"]["values"]["train.learning_rate"]
    statuses = {run["run"]: run["status"] for run in Command("status", str(file), "--json").finish()["runs"]}
    assert statuses[said["sweep"]] == "done" and statuses[said["best"]["run"]] == "done"
    assert len(statuses) == 4
    again = Command("run", said["file"], "--json").finish()
    assert again["run"] == said["best"]["run"] and again["weights_digest"] == said["weights_digest"]
    assert {stage["outcome"] for stage in again["stages"]} == {"reused"}


def test_repeated_tune_trains_nothing(swept: tuple[Path, dict[str, Any]]) -> None:
    file, said = swept
    again = Command("tune", str(file), "--json", *SMALL).finish()
    assert again["trials"] == said["trials"]
    assert {stage["outcome"] for stage in again["stages"]} == {"reused"}
    assert again["model_uri"] == said["model_uri"]
