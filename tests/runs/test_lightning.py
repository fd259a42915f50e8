"""A LightningModule in whole runs: the template, a killed worker, a killed driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.flows.verbs.init import create_project
from tests.runs.killed import calm_and_killed
from tests.runs.raw_scores import check_raw_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_prefect")]


@pytest.mark.drill
def test_the_tumours_are_told_apart_by_a_lightning_module_and_a_killed_worker_and_driver_change_no_bit(tmp_path: Path) -> None:
    settings = [
        "train.workers=2",
        "train.cpus_per_worker=0.5",
        "train.checkpoint={every_steps: 7, every_epoch: false}",
        "train.epochs=40",
    ]
    calm, ended = calm_and_killed(tmp_path, lambda folder: create_project(folder, "lightning")[0], settings)
    assert (calm["status"], calm["exactness"], calm["model_uri"]) == ("done", "bit-exact", "models:/diagnosis/1")
    assert calm["metrics"]["test/accuracy"] >= 0.93 and calm["metrics"]["test/auroc"] >= 0.98
    assert list(tmp_path.glob("calm/.penstock/mlflow/artifacts/**/evaluation/test-roc.png"))
    check_raw_rows(tmp_path / "calm" / "pipeline.yaml", calm)
    assert (ended["attempt"], ended["status"], ended["exactness"]) == (2, "done", "bit-exact")
    assert ended["weights_digest"] == calm["weights_digest"] and ended["metrics"] == calm["metrics"]
