"""The Keras model of docs/keras.md in whole runs: killed twice, then asked by its registered version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from penstock.flows.verbs.init import create_project
from penstock.training.frameworks.loops.own_loop import installed
from tests import ROOT
from tests.runs.killed import calm_and_killed, mlflow_folder
from tests.runs.raw_scores import check_raw_rows

if not installed("keras"):  # to import it would choose its backend
    pytest.skip('pip install "penstock[keras]"', allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.drill, pytest.mark.usefixtures("shared_prefect")]


def make(folder: Path) -> Path:
    """The tumours of the template, told apart by what the page has."""
    file = create_project(folder, "lightning")[0]
    page = (ROOT / "docs" / "keras.md").read_text(encoding="utf-8")
    spec = yaml.safe_load(file.read_text()) | yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    file.write_text(yaml.safe_dump(spec))
    (folder / "model.py").write_text(page.split("```python\n")[1].split("```")[0])
    return file


def test_the_model_of_the_page_is_killed_twice_and_answers_from_the_registry(tmp_path: Path) -> None:
    settings = ["train.checkpoint={every_steps: 7, every_epoch: false}", "train.epochs=20"]
    calm, ended = calm_and_killed(tmp_path, make, settings)
    assert (ended["attempt"], ended["status"], ended["exactness"]) == (2, "done", "bit-exact")
    assert ended["weights_digest"] == calm["weights_digest"] and ended["metrics"] == calm["metrics"]
    assert ended["metrics"]["test/accuracy"] >= 0.93 and ended["metrics"]["test/auroc"] >= 0.98
    check_raw_rows(tmp_path / "killed" / "pipeline.yaml", ended)
    folder = mlflow_folder(tmp_path / "killed" / "pipeline.yaml", "diagnosis")
    script = "import sys; from penstock.training.frameworks.keras.library import import_keras; "
    script += "print(import_keras().models.load_model(sys.argv[1]).output_shape)"
    # In a process of its own: Keras keeps the backend that it was first imported with, and other tests need another.
    command = [sys.executable, "-c", script, str(folder / "artifacts" / "model.keras")]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "(None, 2)"
