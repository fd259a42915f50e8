"""A project may have folders named like penstock's own packages, and be run from inside its folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.drills.project import make_project

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.usefixtures("shared_prefect")
def test_a_project_with_folders_of_the_same_names_runs_from_inside_its_folder(tmp_path: Path) -> None:
    file = make_project(tmp_path / "project", epochs=1, files=1)
    for name in ("penstock", "ingest", "training", "tasks", "flows", "prefect", "mlflow"):
        (file.parent / name).mkdir()
        (file.parent / name / "__init__.py").write_text(f"raise RuntimeError('the user\\'s {name} was imported')\n")
    # As the installed command does: its own folder is first on the path, not the one it is called in.
    script = tmp_path / "bin" / "penstock"
    script.parent.mkdir()
    script.write_text("from flows.cli import main\nmain()\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])}
    done = subprocess.run(
        [sys.executable, str(script), "run", "pipeline.yaml", "--json"],
        cwd=file.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1])["status"] == "done"
