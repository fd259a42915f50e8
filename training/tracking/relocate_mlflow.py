"""Where is the MLflow store of a pipeline, and where are its artifacts, also in a folder that was moved or copied?

MLflow keeps the absolute address of every artifact. In a project that was copied these would be the other project's, and new
models would be written there.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["TRAINING_VIEW", "VIEW_KEY", "VIEW_TAG", "artifacts_beside", "database_of", "follow_its_folder", "mlflow_uri"]


_ADDRESSES = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}
"""Columns that hold an artifact's address, as a URI."""

_PATHS = {
    "params": ("value",),
    "tags": ("value",),
    "logged_model_params": ("param_value",),
    "logged_model_tags": ("tag_value",),
    "model_version_tags": ("value",),
}
"""Columns in which penstock notes paths below the state directory."""


TRAINING_VIEW = "?workflowType=machine_learning"
"""Ends the address of a page. Without it MLflow shows the one for language model applications, until a user changes that."""

VIEW_KEY = "penstock"
"""Name, in the address, of the view of the list of runs that shows their metrics."""

VIEW_TAG = f"mlflow.sharedViewState.{VIEW_KEY}"
"""Tag of an experiment that holds this view, as MLflow's own button for sharing one writes it."""


def mlflow_uri(state_dir: Path) -> str:
    """The tracking (and registry) URI: MLFLOW_TRACKING_URI, else a database below `state_dir`, with artifacts beside it."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{state_dir.absolute()}/mlflow/mlflow.db"


def database_of(tracking_uri: str) -> Path | None:
    """The file of a SQLite store; None for a server."""
    return Path(tracking_uri.removeprefix("sqlite:///")) if tracking_uri.startswith("sqlite:///") else None


def artifacts_beside(database: Path) -> Path:
    """Where the artifacts of penstock's own store lie."""
    return database.parent / "artifacts"


def follow_its_folder(database: Path) -> None:
    """Let penstock's own store (`.penstock/mlflow`) whose artifacts have moved together with it find them.

    Any other store is left as it is: its artifacts may well lie elsewhere.

    Raises:
        sqlite3.Error: the database is damaged, or locked for long.
    """
    here = artifacts_beside(database)
    if not database.exists() or not here.is_dir():
        return
    with contextlib.closing(sqlite3.connect(database, timeout=30)) as store:
        ours = {location for (location,) in store.execute("SELECT DISTINCT artifact_location FROM experiments")}
        for old in ours - {here.as_uri()}:
            folder = Path(urllib.parse.unquote(str(old).removeprefix("file://")))
            if str(old).startswith("file:///") and folder.parts[-3:] == here.parts[-3:] == (".penstock", "mlflow", "artifacts"):
                with store:
                    _move(store, _ADDRESSES, folder.as_uri(), here.as_uri())
                    _move(store, _PATHS, str(folder.parents[1]), str(here.parents[1]))


def _move(store: sqlite3.Connection, columns: Mapping[str, Sequence[str]], old: str, new: str) -> None:
    for table, names in columns.items():
        there = {row[1] for row in store.execute(f"PRAGMA table_info({table})")}
        for name in there.intersection(names):
            store.execute(
                f"UPDATE {table} SET {name} = ? || substr({name}, ?) WHERE {name} = ? OR substr({name}, 1, ?) = ?",
                (new, len(old) + 1, old, len(old) + 1, f"{old}/"),
            )
