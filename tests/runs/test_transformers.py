"""The Hugging Face model of docs/transformers.md in whole runs: killed twice, then asked by its registered version."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from penstock.flows.verbs.init import create_project
from tests import ROOT
from tests.runs.killed import calm_and_killed, mlflow_folder
from tests.runs.raw_scores import check_raw_rows

transformers = pytest.importorskip("transformers", reason='pip install "penstock[transformers]"; `make frameworks` does')
pytestmark = [pytest.mark.slow, pytest.mark.drill, pytest.mark.usefixtures("shared_prefect")]


def make(folder: Path) -> Path:
    """The digits of the template, told apart by what the page has."""
    file = create_project(folder, "images")[0]
    page = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    spec = yaml.safe_load(file.read_text()) | yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    file.write_text(yaml.safe_dump(spec))
    (folder / "model.py").write_text(page.split("```python\n")[1].split("```")[0])
    return file


def test_the_model_of_the_page_is_killed_twice_and_answers_from_the_registry(tmp_path: Path) -> None:
    settings = ["train.workers=2", "train.cpus_per_worker=0.5", "train.checkpoint={every_steps: 5}"]
    calm, ended = calm_and_killed(tmp_path, make, settings)
    assert (ended["attempt"], ended["status"], ended["exactness"]) == (2, "done", "bit-exact")
    assert ended["weights_digest"] == calm["weights_digest"] and ended["metrics"] == calm["metrics"]
    assert ended["metrics"]["test/accuracy"] > 0.5, "a guess is right in a tenth"
    check_raw_rows(tmp_path / "killed" / "pipeline.yaml", ended)
    folder = mlflow_folder(tmp_path / "killed" / "pipeline.yaml", "digits")
    given = transformers.ViTForImageClassification.from_pretrained(folder / "artifacts", local_files_only=True)
    assert given.config.num_labels == 10
