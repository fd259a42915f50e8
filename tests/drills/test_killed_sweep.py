"""A sweep is killed, group and all, while trials train; repeated, every trial comes to the weights that it has undisturbed."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from tests.drills.project import make_project
from tests.drills.without_servers import leave_out_servers, run_here
from tests.runs.forked import Command

pytestmark = [pytest.mark.slow, pytest.mark.drill, pytest.mark.usefixtures("shared_prefect")]

PARALLEL = """
tune:
  space: {train.learning_rate: {log_range: [1e-3, 1e-1]}}
  trials: 3
  concurrent: 2
"""

ONE_BY_ONE = """
tune:
  space: {train.learning_rate: {log_range: [1e-5, 1e-1]}}
  trials: 3
  concurrent: 1
  scheduler: asha
  reduction: 2
"""

SLOW = {"DRILL_PAUSE_S": "0.1"}
"""For attempts that are killed: a step takes its time."""
HELD = {"DRILL_HELD_AT": "20"}
"""For one that is killed in its first trials, however late one of them begins."""


def project(folder: Path, tune: str) -> Path:
    """Three epochs of 23 steps on one worker, and a section `tune`."""
    file = make_project(folder, epochs=3, files=2)
    file.write_text(file.read_text() + tune)
    return file


def trained(folder: Path, number: int, steps: int) -> Callable[[], bool]:
    """Whether that trial has a checkpoint of `steps` or later."""

    def seen() -> bool:
        names = [path.parent.name for path in folder.glob(f".penstock/runs/*-sweep-{number:03d}/checkpoints/*/manifest.json")]
        return any(int(name.split("-")[1]) >= steps for name in names)

    return seen


def trains_again(folder: Path, number: int) -> bool:
    """Whether that trial trains in a second attempt. Its checkpoints tell nothing: workers live on for a while after a kill."""
    records = folder.glob(f".penstock/runs/*-sweep-{number:03d}/attempts/0002.json")
    return any(json.loads(record.read_text())["workers"] for record in records)


def killed(file: Path, what: str, seen: Callable[[], bool], environment: dict[str, str] = SLOW) -> None:
    command = Command("tune", str(file), "--json", environment=environment)
    command.wait_for(what, seen)
    os.killpg(command.process.pid, signal.SIGKILL)
    command.process.communicate()


def facts(said: dict[str, Any]) -> list[tuple[Any, ...]]:
    names = ("number", "values", "state", "value", "step", "weights_digest")
    return [tuple(trial[name] for name in names) for trial in said["trials"]]


def reports(folder: Path, sweep: str) -> list[list[tuple[int, float]]]:
    files = sorted(folder.glob(f".penstock/runs/{sweep}/trials/*.json"))
    return [[(each["step"], each["value"]) for each in json.loads(file.read_text())["reports"]] for file in files]


def test_three_kills_keep_the_weights_of_all_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = project(tmp_path / "killed" / "project", PARALLEL)
    killed(file, "checkpoints of both trials", lambda: all(trained(file.parent, number, 5)() for number in (1, 2)), HELD)
    killed(file, "checkpoints of the third", trained(file.parent, 3, 5))
    killed(file, "the third to train again", lambda: trains_again(file.parent, 3))
    last = Command("tune", str(file), "--json")
    survived = last.finish()
    assert re.search("trial [12] is done already", last.said) and "trial 3 continues" in last.said
    assert [(trial["number"], trial["state"]) for trial in survived["trials"]] == [(1, "done"), (2, "done"), (3, "done")]
    assert survived["model_uri"] == "models:/drill/1"
    for number, cuts in ((1, 1), (2, 1), (3, 2)):
        attempts = list(file.parent.glob(f".penstock/runs/{survived['sweep']}-{number:03d}/attempts/*.json"))
        assert len(attempts) > cuts, "each was cut, the third twice"

    leave_out_servers(monkeypatch)
    for trial in survived["trials"]:
        (rate,) = trial["values"].values()
        alone = run_here(project(tmp_path / f"alone{trial['number']}", ""), [f"train.learning_rate={rate!r}"])
        assert alone["weights_digest"] == trial["weights_digest"]
        if trial["weights_digest"] == survived["weights_digest"]:
            assert survived["metrics"] == alone["metrics"]


def test_killed_sweep_stops_the_same_trials_early(tmp_path: Path) -> None:
    calm_file, file = (project(tmp_path / name / "project", ONE_BY_ONE) for name in ("calm", "killed"))
    calm = Command("tune", str(calm_file), "--json").finish()
    states = [trial["state"] for trial in calm["trials"]]
    assert "stopped" in states and "done" in states
    killed(file, "checkpoints of the second", trained(file.parent, 2, 5))
    survived = Command("tune", str(file), "--json").finish()
    assert facts(survived) == facts(calm)
    assert reports(file.parent, survived["sweep"]) == reports(calm_file.parent, calm["sweep"])
    for folder, sweep in ((calm_file.parent, calm), (file.parent, survived)):
        client = MlflowClient(f"sqlite:///{folder}/.penstock/mlflow/mlflow.db")
        runs = [json.loads((folder / f".penstock/runs/{trial['run']}/run.json").read_text()) for trial in sweep["trials"]]
        tags = [client.get_run(run["tracking_runs"]["mlflow"]).data.tags for run in runs]
        expected = ["stopped early" if trial["state"] == "stopped" else None for trial in sweep["trials"]]
        assert [each.get("penstock.trial.state") for each in tags] == expected
    stopped = next(trial for trial in survived["trials"] if trial["state"] == "stopped")
    assert stopped["note"].startswith("stopped early by asha after ")
