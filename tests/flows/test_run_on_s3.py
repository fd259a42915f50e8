"""The same pipeline, rows and state in an object store: a real S3 server, a kill -9, and the weights of a local run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from penstock.storage import Storage
from tests.drills.project import Command, make_project
from tests.flows.conftest import CALM_EPOCHS, CALM_FILES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PAUSED = ["--set", "train.params={pause_s: 0.05}"]


def outcomes(result: dict[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["outcome"] for stage in result["stages"]}


@pytest.mark.usefixtures("shared_prefect")
def test_killed_on_an_object_store_it_continues_to_the_weights_of_a_local_run(
    tmp_path: Path, calm: dict[str, Any], s3_bucket: str
) -> None:
    file = make_project(tmp_path / "remote", epochs=CALM_EPOCHS, files=CALM_FILES)
    rows = file.parent / "data" / "train"
    S3FileSystem().put(f"{rows}/", f"{s3_bucket}/rows/train/", recursive=True)
    for part in rows.iterdir():
        part.unlink()
    text = file.read_text().replace("train: data/train/", f"train: {s3_bucket}/rows/train/")
    file.write_text(f"{text}storage: {s3_bucket}/state\n")
    words = [str(file), "--json", *PAUSED]
    storage = Storage(f"{s3_bucket}/state")

    def has_checkpoint() -> bool:
        return any(
            storage.exists(f"runs/{run}/checkpoints/{name}/manifest.json")
            for run in storage.list("runs")
            for name in storage.list(f"runs/{run}/checkpoints")
        )

    command = Command("run", *words)
    command.wait_for("a checkpoint", has_checkpoint)
    command.kill()

    continued = Command("run", *words).finish()
    assert outcomes(continued) == {
        **dict.fromkeys(("read", "preprocess", "materialize", "shuffle"), "reused"),
        "train": "resumed",
        **dict.fromkeys(("evaluate", "register"), "ran"),
    }
    assert continued["attempt"] == 2
    assert continued["exactness"] == "bit-exact"
    assert continued["weights_digest"] == calm["weights_digest"]
    assert continued["metrics"] == calm["metrics"]
    # Rows and checkpoints are in the store and nowhere else; servers that are embedded keep their files here.
    assert {path.name for path in (file.parent / ".penstock").iterdir()} <= {"mlflow", "prefect", "ray", "ray-cluster"}

    again = Command("run", *words).finish()
    assert set(outcomes(again).values()) == {"reused"}
    assert again["model_uri"] == continued["model_uri"]
    listed = Command("status", str(file), "--json").finish()
    assert [(run["run"], run["status"], run["step"]) for run in listed["runs"]] == [(continued["run"], "done", 115)]
