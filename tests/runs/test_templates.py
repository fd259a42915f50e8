"""The projects of `penstock init` learn what they promise, and come to the rows and weights that golden.json holds."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.flows.verbs.init import create_project
from tests import ROOT
from tests.runs.forked import Command
from tests.runs.raw_scores import check_raw_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_prefect")]

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())


def check_golden(template: str, project: Path, result: dict[str, Any]) -> None:
    """Prepared rows are the same on every machine; weights on the kind of CPU and the torch that they were recorded with.

    CPUs of one name with and without AVX-512 may come to other weights: golden.json holds those of both, where they differ.
    A machine of no kind on record compares none, and pytest's summary says so.
    """
    (manifest,) = project.glob(".penstock/datasets/*/manifest.json")
    assert json.loads(manifest.read_text())["content_digest"] == GOLDEN["content"][template]
    line = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    cpu = line.split(":")[1].strip()
    if cpu in GOLDEN["weights"] and torch.__version__ == GOLDEN["torch"] and not torch.cuda.is_available():
        assert result["weights_digest"] in GOLDEN["weights"][cpu][template]
    else:
        warnings.warn(f"{template}: golden.json has no weights of {cpu}, torch {torch.__version__}: not compared", stacklevel=2)


@pytest.mark.drill
def test_the_tumours_are_told_apart_from_inside_a_folder_that_holds_folders_named_like_our_packages(tmp_path: Path) -> None:
    project = create_project(tmp_path / "project", "tabular")[0].parent
    for name in ("penstock", "ingest", "training", "tasks", "flows", "prefect", "mlflow"):
        (project / name).mkdir()
        (project / name / "__init__.py").write_text(f"raise RuntimeError('the user\\'s {name} was imported')\n")
    # As the installed command does: its own folder is first on the path, not the one it is called in.
    script = tmp_path / "bin" / "penstock"
    script.parent.mkdir()
    script.write_text("from penstock.flows.cli import main\nmain()\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])}
    done = subprocess.run(
        [sys.executable, str(script), "run", "pipeline.yaml", "--json"],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["status"] == "done"
    assert result["metrics"]["test/accuracy"] >= 0.93
    assert result["metrics"]["test/auroc"] >= 0.95
    # The template keeps the best of its checkpoints by `val/loss`: that one is named, measured and registered.
    manifests = project.glob(f".penstock/runs/{result['run']}/checkpoints/*/manifest.json")
    kept = {path.parent.name: json.loads(path.read_text()) for path in manifests}
    best = min(kept, key=lambda name: kept[name]["metrics"].get("val/loss", math.inf))
    assert result["checkpoint"] == best
    assert result["weights_digest"] == kept[best]["weights_digest"]
    check_golden("tabular", project, result)
    check_raw_rows(project / "pipeline.yaml", result)


@pytest.mark.drill
def test_the_characters_become_less_surprising(tmp_path: Path) -> None:
    file = create_project(tmp_path / "project", "text")[0]
    command = Command("run", str(file), "--json", "--set", "train.max_steps=40")
    result = command.finish()
    assert result["status"] == "done"
    assert "Downloading" not in command.said, "nobody but penstock says anything"
    # One guess among 128 costs log(128) = 4.9 nats, one among the characters that are frequent about 3.
    assert result["metrics"]["test/loss"] < 0.7 * math.log(128)
    check_golden("text", file.parent, result)
    check_raw_rows(file, result)


@pytest.mark.drill
def test_the_digits_are_read(tmp_path: Path) -> None:
    file = create_project(tmp_path / "project", "images")[0]
    result = Command("run", str(file), "--json").finish()
    # Of the checkpoints that are equally good on validation rows the latest; the earliest has 0.960.
    assert result["metrics"]["test/accuracy"] > 0.97
    check_golden("images", file.parent, result)
    check_raw_rows(file, result)
