"""A run that nothing disturbs, once for all tests of the command that compare with it."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.drills.project import Command, make_project

CALM_EPOCHS, CALM_FILES = 5, 2
"""Of the project below; the weights of another one with the same two are the same."""


@pytest.fixture(scope="session")
def calm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this test run see."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "calm"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def calm_file(calm_folder: Path, calm: dict[str, Any]) -> Path:
    """The pipeline file of `calm`."""
    return calm_folder / "project" / "pipeline.yaml"


@pytest.fixture(scope="session")
def calm(calm_folder: Path) -> dict[str, Any]:
    """What `penstock run --json` said of `calm_file`, from the plan of seven stages to run to the registered model."""
    said = calm_folder / "said.json"
    with open(calm_folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            file = make_project(calm_folder / "project", epochs=CALM_EPOCHS, files=CALM_FILES)
            planned = Command("plan", str(file), "--json").finish()
            assert [stage["action"] for stage in planned["stages"]] == ["run"] * 7
            said.write_text(json.dumps(Command("run", str(file), "--json").finish()))
    return json.loads(said.read_text())  # type: ignore[no-any-return]
