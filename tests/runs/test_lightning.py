"""A LightningModule in whole runs: the template, a killed worker, a killed driver."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from penstock.flows.verbs.init import create_project
from tests.drills.project import Command
from tests.runs.raw_scores import check_raw_rows
from tests.runs.test_boosted import newest_step, run_folder, workers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_prefect")]


def test_the_tumours_are_told_apart_by_a_lightning_module(tmp_path: Path) -> None:
    file = create_project(tmp_path / "project", "lightning")[0]
    result = Command("run", str(file), "--json", "--set", "train.epochs=8").finish()
    assert (result["status"], result["exactness"], result["model_uri"]) == ("done", "bit-exact", "models:/diagnosis/1")
    assert result["metrics"]["test/accuracy"] >= 0.93 and result["metrics"]["test/auroc"] >= 0.98
    assert list(file.parent.glob(".penstock/mlflow/artifacts/**/evaluation/test-roc.png"))
    check_raw_rows(file, result)


@pytest.mark.drill
def test_a_killed_worker_and_a_killed_driver_change_no_bit(tmp_path: Path) -> None:
    settings = ["train.checkpoint={every_steps: 7, every_epoch: false}", "train.epochs=120"]
    words = [word for setting in settings for word in ("--set", setting)]
    calm = Command("run", str(create_project(tmp_path / "calm", "lightning")[0]), "--json", *words).finish()
    file = create_project(tmp_path / "killed", "lightning")[0]
    command = Command("run", str(file), "--json", *words)
    command.wait_for("a run", lambda: any((file.parent / ".penstock" / "runs").glob("*/checkpoints/*/manifest.json")))
    folder = run_folder(file)
    os.kill(workers(folder)["1"], signal.SIGKILL)
    first = newest_step(folder)
    command.wait_for("the workers to go on", lambda: newest_step(folder) >= first + 14)
    command.kill()
    ended = Command("run", str(file), "--json", *words).finish()
    assert (ended["attempt"], ended["status"], ended["exactness"]) == (2, "done", "bit-exact")
    assert ended["weights_digest"] == calm["weights_digest"] and ended["metrics"] == calm["metrics"]
