"""One pipeline twice: undisturbed, and with a worker and then the command killed. What both ended with."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlflow.artifacts
from mlflow import MlflowClient

from tests.drills.project import Command

__all__ = ["calm_and_killed", "mlflow_folder"]


def _run_folder(file: Path) -> Path:
    (folder,) = (file.parent / ".penstock" / "runs").iterdir()
    return folder


def _workers(folder: Path) -> dict[str, int]:
    newest = max((folder / "attempts").iterdir())
    found: dict[str, Any] = json.loads(newest.read_text())["workers"]
    return {rank: int(place.rsplit(":", 1)[1]) for rank, place in found.items()}


def _newest_step(folder: Path) -> int:
    return max((int(path.parent.name.split("-")[1]) for path in folder.glob("checkpoints/*/manifest.json")), default=0)


def calm_and_killed(
    folder: Path, make: Callable[[Path], Path], settings: Sequence[str], *, victim: str = "1", ahead: int = 14
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run what `make` makes in two folders below `folder`; returns the results of the undisturbed and of the killed run.

    Args:
        make: folder -> pipeline file.
        settings: of the command, as `train.epochs=3`.
        victim: rank of the worker that is killed.
        ahead: steps that it goes on after that before the command is killed.
    """
    words = [word for setting in settings for word in ("--set", setting)]
    calm = Command("run", str(make(folder / "calm")), "--json", *words).finish()
    file = make(folder / "killed")
    command = Command("run", str(file), "--json", *words)
    command.wait_for("a run", lambda: any((file.parent / ".penstock" / "runs").glob("*/checkpoints/*/manifest.json")))
    folder = _run_folder(file)
    os.kill(_workers(folder)[victim], signal.SIGKILL)
    first = _newest_step(folder)
    command.wait_for("the workers to go on", lambda: _newest_step(folder) >= first + ahead)
    command.kill()
    return calm, Command("run", str(file), "--json", *words).finish()


def mlflow_folder(file: Path, model: str) -> Path:
    """What MLflow keeps of the version that has the alias `candidate`, in the store that lies beside the pipeline file."""
    store = f"sqlite:///{file.parent}/.penstock/mlflow/mlflow.db"
    version = MlflowClient(store, store).get_model_version_by_alias(model, "candidate")
    return Path(mlflow.artifacts.download_artifacts(artifact_uri=version.source, tracking_uri=store))
