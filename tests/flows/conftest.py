"""A run that nothing disturbs, once for all tests of the command that compare with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.drills.project import Command, make_project

CALM_EPOCHS, CALM_FILES = 5, 2
"""Of the project below; the weights of another one with the same two are the same."""


@pytest.fixture(scope="session")
def calm_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline file, not yet run."""
    return make_project(tmp_path_factory.mktemp("calm") / "project", epochs=CALM_EPOCHS, files=CALM_FILES)


@pytest.fixture(scope="session")
def calm(calm_file: Path) -> dict[str, Any]:
    """What `penstock run --json` said of `calm_file`, from the plan of seven stages to run to the registered model."""
    planned = Command("plan", str(calm_file), "--json").finish()
    assert [stage["action"] for stage in planned["stages"]] == ["run"] * 7
    return Command("run", str(calm_file), "--json").finish()
