"""The command with rows in Ray's object store and with streams: all stages, a kill -9 in training, and everything reused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from tests.drills.project import make_project
from tests.runs.forked import Command
from tests.runs.killed import kill_worker_and_command

pytestmark = pytest.mark.drill

STEPS = 360
FIRST_WINDOW_STEPS = 125
"""A checkpoint beyond them leaves a stream whole windows to skip."""
WINDOWED = ["--set", "shuffle.mode=windowed", "--set", "shuffle.window_rows=500"]
WINDOWED += ["--set", "train.batch_rows=4"]
WORKERS = {"memory": 1, "none": 2}
"""Two share one stream."""
HELD_AT = "240"
"""The step beyond which the attempt that is killed does not come."""


@pytest.fixture(scope="module")
def server(prefect_url: str) -> dict[str, str]:
    return {"PREFECT_API_URL": prefect_url}


@pytest.fixture(scope="module", params=["memory", "none"])
def cache(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def words(cache: str, file: Path, *more: str) -> list[str]:
    return [
        str(file),
        "--json",
        "--set",
        f"materialize.cache={cache}",
        "--set",
        f"train.workers={WORKERS[cache]}",
        *WINDOWED,
        *more,
    ]


@pytest.fixture(scope="module")
def calm(cache: str, server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of a run that nothing disturbed, with the same cache: windows of a stream are others than those of memory."""
    file = make_project(tmp_path_factory.mktemp("calm") / "project", epochs=1, files=3)
    return Command("run", *words(cache, file), environment=server).finish()


@pytest.fixture(scope="module")
def killed(cache: str, server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that was killed in training and continued: its file, and the result of the second attempt."""
    file = make_project(tmp_path_factory.mktemp("killed") / "project", epochs=1, files=3)
    command = Command("run", *words(cache, file), environment={**server, "DRILL_HELD_AT": HELD_AT})
    kill_worker_and_command(command, file, FIRST_WINDOW_STEPS)
    # What the kill left is repaired by the first command that looks, `run` or `status`.
    (seen,) = Command("status", str(file), "--json", environment=server).finish()["runs"]
    assert seen["status"] == "killed"
    history = MlflowClient(f"sqlite:///{file.parent}/.penstock/mlflow/mlflow.db")
    assert history.get_run(seen["mlflow_run_id"]).info.status == "KILLED"
    return file, Command("run", *words(cache, file), environment=server).finish()


def outcomes(result: dict[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["outcome"] for stage in result["stages"]}


def test_every_stage_runs_and_no_prepared_rows_are_on_disk(calm: dict[str, Any]) -> None:
    assert set(outcomes(calm).values()) == {"ran"}
    assert calm["exactness"] == "bit-exact"
    assert calm["model_uri"] == "models:/drill/1"


def test_a_killed_training_continues_inside_its_epoch_to_the_same_weights(
    cache: str, calm: dict[str, Any], killed: tuple[Path, dict[str, Any]]
) -> None:
    file, result = killed
    assert {path.parent.name for path in (file.parent / ".penstock").rglob("*.arrow")} == {"answers"}
    attempt = json.loads(next((file.parent / ".penstock").glob("runs/*/attempts/*2.json")).read_text())
    assert FIRST_WINDOW_STEPS < attempt["resumed_from_step"] < STEPS
    # Rows in memory died with the first attempt; a stream needs only what is on record.
    assert outcomes(result)["materialize"] == {"memory": "ran", "none": "reused"}[cache]
    assert outcomes(result)["train"] == "resumed"
    assert result["exactness"] == "bit-exact"
    assert result["weights_digest"] == calm["weights_digest"]
    assert result["metrics"] == calm["metrics"]


def test_with_nothing_left_to_do_nothing_is_prepared_again(
    cache: str, server: dict[str, str], killed: tuple[Path, dict[str, Any]]
) -> None:
    file, result = killed
    planned = Command("plan", *words(cache, file), environment=server).finish()
    assert {stage["action"] for stage in planned["stages"]} == {"reuse"}
    # Other metrics are measured, and that is all.
    measured = Command("run", *words(cache, file, "--set", "evaluate.metrics=[accuracy]"), environment=server).finish()
    found = outcomes(measured)
    assert found["evaluate"] == "ran"
    assert {found[name] for name in found.keys() - {"evaluate", "register"}} == {"reused"}
    assert measured["weights_digest"] == result["weights_digest"]
    assert measured["metrics"]["val/accuracy"] == result["metrics"]["val/accuracy"]


def test_the_plan_tells_whether_more_training_prepares_rows_first(cache: str, killed: tuple[Path, dict[str, Any]]) -> None:
    file, _ = killed
    planned = Command("plan", *words(cache, file, "--set", "train.epochs=2")).finish()
    actions = {stage["name"]: stage["action"] for stage in planned["stages"]}
    assert actions["materialize"] == {"memory": "run", "none": "reuse"}[cache]
    assert actions["train"] == "resume"
