"""One pipeline twice: undisturbed, and with a worker and then the command killed. What both ended with."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlflow.artifacts
import psutil
from mlflow import MlflowClient

from tests.runs.forked import Command

__all__ = ["calm_and_killed", "kill_worker", "kill_worker_and_command", "mlflow_folder", "run"]

START_S = 600
"""For what needs a whole start of Ray, on a machine three times slower than an idle one."""


def run(file: Path, settings: Sequence[str] = ()) -> Command:
    """`penstock run --json` of a pipeline file with settings such as `train.epochs=3`."""
    return Command("run", str(file), "--json", *(word for setting in settings for word in ("--set", setting)))


def _workers(file: Path) -> list[int]:
    """Process ids of the workers of the newest attempt of the newest run, by their ranks."""
    attempts = (file.parent / ".penstock" / "runs").glob("*/attempts/*.json")
    newest = max(attempts, key=lambda path: (path.parent.parent.name, path.name))
    found: dict[str, Any] = json.loads(newest.read_text())["workers"]
    return [int(found[rank].rsplit(":", 1)[1]) for rank in sorted(found, key=int)]


def _newest_step(file: Path) -> int:
    """Of the newest run."""
    folder = max((file.parent / ".penstock" / "runs").glob("*/checkpoints"), default=file)
    return max((int(path.parent.name.split("-")[1]) for path in folder.glob("*/manifest.json")), default=0)


def kill_worker(command: Command, file: Path, known: int = 0) -> int:
    """SIGKILL the worker of the last rank once a checkpoint beyond step `known` is there; returns the newest one's step."""
    command.wait_for(
        "a checkpoint", lambda: _newest_step(file) > known and any(map(psutil.pid_exists, _workers(file)[-1:])), START_S
    )
    os.kill(_workers(file)[-1], signal.SIGKILL)
    return _newest_step(file)


def kill_worker_and_command(command: Command, file: Path, known: int = 0) -> None:
    """Both at once, so that no worker of a command that is gone trains to the end."""
    kill_worker(command, file, known)
    command.kill()


def calm_and_killed(
    folder: Path, make: Callable[[Path], Path], settings: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run what `make` makes in two folders below `folder`; returns the results of the undisturbed and of the killed run.

    The second loses a worker, goes on with another, loses that one and the command, and is continued by a second command.

    Args:
        make: folder -> pipeline file.
        settings: of the command, as `train.epochs=3`.
    """
    calm = run(make(folder / "calm"), settings).finish()
    file = make(folder / "killed")
    command = run(file, settings)
    known = kill_worker(command, file)
    kill_worker_and_command(command, file, known)
    return calm, run(file, settings).finish()


def mlflow_folder(file: Path, model: str) -> Path:
    """What MLflow keeps of the version that has the alias `candidate`, in the store that lies beside the pipeline file."""
    store = f"sqlite:///{file.parent}/.penstock/mlflow/mlflow.db"
    version = MlflowClient(store, store).get_model_version_by_alias(model, "candidate")
    return Path(mlflow.artifacts.download_artifacts(artifact_uri=version.source, tracking_uri=store))
