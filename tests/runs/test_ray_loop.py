"""A function written for Ray Train in whole runs: the template, a killed worker, a killed driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from penstock.flows.verbs.init import create_project
from tests.runs.forked import Command
from tests.runs.killed import calm_and_killed
from tests.runs.raw_scores import check_raw_rows

pytestmark = [pytest.mark.slow, pytest.mark.drill, pytest.mark.usefixtures("shared_prefect")]


LOADER = 'train.iter_torch_batches(batch_size=config["batch_size"])'


def make(folder: Path) -> Path:
    """The template; in the run that is killed its loader is made once, before the epochs, as Ray's guides have it."""
    file = create_project(folder, "ray-loop")[0]
    if folder.name == "killed":
        loop = file.parent / "loop.py"
        before, epochs, rest = loop.read_text().partition("    for epoch in range(first_epoch")
        assert LOADER in rest
        loop.write_text(f"{before}    loader = {LOADER}\n{epochs}{rest.replace(LOADER, 'loader')}")
    return file


def test_the_template_tells_digits_apart_also_after_two_kills(tmp_path: Path) -> None:
    settings = ["train.workers=1", "train.params={width: 8, lr: 0.004, epochs: 20, batch_size: 32}"]
    calm, ended = calm_and_killed(tmp_path, make, settings)
    assert (calm["status"], calm["exactness"], ended["attempt"], ended["status"]) == (
        "done",
        "same-order: the state that train_func restores is not verified",
        2,
        "done",
    )
    assert ended["exactness"].startswith(calm["exactness"])
    assert ended["weights_digest"] == calm["weights_digest"] and ended["metrics"] == calm["metrics"]
    assert ended["metrics"]["test/accuracy"] >= 0.85
    check_raw_rows(tmp_path / "killed" / "pipeline.yaml", ended)
    of_a_step = Command("rows", ended["run"], "--step", "5", "--file", str(tmp_path / "killed" / "pipeline.yaml"), "--json")
    assert "of a size that it chooses" in of_a_step.finish(2)["error"]["message"]


PROGRAM = """\
import json, sys
from pathlib import Path
import penstock

reports = []
result = penstock.run(sys.argv[1], sys.argv[2:], on_report=reports.append)
with result.checkpoint.as_directory() as last, result.best_checkpoint.as_directory() as best:
    folders = [[str(path) for path in Path(folder).iterdir()] for folder in (last, best)]
print(json.dumps({"result": result, "reports": reports, "folders": folders}))
"""


def test_program_gets_reports_folders_and_returned_values(tmp_path: Path) -> None:
    file = create_project(tmp_path / "project", "ray-loop")[0]
    loop = file.parent / "loop.py"
    shown = '"epoch": epoch, "note": f"epoch {epoch}", "pixels": batch["image"]}\n'
    text = loop.read_text().replace('"epoch": epoch}\n', shown)
    loop.write_text(text.replace("\n\n\ndef plain", '\n    return {"epochs": config["epochs"]}\n\n\ndef plain'))
    overrides = ["train.params={width: 8, lr: 0.004, epochs: 2, batch_size: 64}", "train.report={val/accuracy: mean}"]
    overrides += ["train.checkpoint.keep=0", "train.checkpoint.keep_best=2", "register.promote={metric: epoch, mode: max}"]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file), *overrides], capture_output=True, text=True, env=os.environ, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    result = found["result"]
    assert (result["status"], result["returned"]) == ("done", [{"epochs": 2}] * 2)
    assert [(each["rank"], each["report/iteration"], each["note"]) for each in found["reports"]] == [
        (rank, epoch + 1, f"epoch {epoch}") for epoch in range(2) for rank in range(2)
    ]
    checkpoints = file.parent / ".penstock" / "runs" / result["run"] / "checkpoints"
    assert [len(folder) for folder in found["folders"]] == [1, 1] and len(list(checkpoints.iterdir())) == 2
    assert result["checkpoints"]["best"] == f"{checkpoints}/{result['checkpoint']}/folder"
    assert found["folders"][1] == [f"{checkpoints}/{result['checkpoint']}/folder/state.pt"]
    client = MlflowClient(f"sqlite:///{file.parent}/.penstock/mlflow/mlflow.db")

    def names(folder: str) -> list[str]:
        return [artifact.path for artifact in client.list_artifacts(result["mlflow_run_id"], folder)]

    assert names("checkpoint/last") == ["checkpoint/last/state.pt"] and names("checkpoint/best") == ["checkpoint/best/state.pt"]
    assert len(names("reports/note")) == len(names("reports/pixels")) == 2
    version = client.get_model_version("digits", "1")
    assert Path(str(version.source).removeprefix("file://"), "artifacts", "folder", "state.pt").is_file()

    def promotion(epochs: int) -> Any:
        sets = [each.replace("epochs: 2", f"epochs: {epochs}") for each in overrides]
        return Command("run", str(file), *(word for each in sets for word in ("--set", each)), "--json").finish()["promotion"]

    assert result["promotion"]["moved"] and result["promotion"]["before"] is None
    more = promotion(4)
    assert (more["holder"], more["metric"]) == ("1", "epoch")
    assert more["moved"] is (more["after"] > more["before"]) and 0 <= more["before"] <= 1, "the epoch of the best checkpoint"
