"""A function written for Ray Train in whole runs: the template, a killed worker, a killed driver."""

from __future__ import annotations

from pathlib import Path

import pytest

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
