"""A name for a run that is not there is answered with what is there, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import SpecError
from penstock.flows.verbs.which_run import RunNames
from tests.drills.project import make_project


@pytest.mark.parametrize("name", ["last", "previous", "best"])
def test_names_by_order_say_how_many_runs_there_are(tmp_path: Path, name: str) -> None:
    file = make_project(tmp_path / "project", files=1)
    with pytest.raises(SpecError, match=rf"there is no run '{name}' in .*, which has 0 runs\n") as found:
        RunNames(file).find(name)
    assert found.value.next_step == f"penstock run {file}"
