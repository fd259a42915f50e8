"""Where is a pipeline's own MLflow store, where do its artifacts lie, and at which address does `penstock ui` show it?"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

__all__ = ["TRAINING_VIEW", "artifacts_beside", "database_of", "mlflow_uri", "relocate_artifacts"]

_ADDRESSES = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}
"""Columns that hold an artifact's address, as a URI."""

TRAINING_VIEW = "?workflowType=machine_learning"
"""Ends the address of a page. Without it MLflow shows the one for language model applications, until a user changes that."""


def mlflow_uri(state_dir: Path) -> str:
    """The tracking (and registry) URI: MLFLOW_TRACKING_URI, else a database below `state_dir`, with artifacts beside it."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{state_dir.absolute()}/mlflow/mlflow.db"


def database_of(tracking_uri: str) -> Path | None:
    """The file of a SQLite store; None for a server."""
    return Path(tracking_uri.removeprefix("sqlite:///")) if tracking_uri.startswith("sqlite:///") else None


def artifacts_beside(database: Path) -> Path:
    """The folder of the artifacts of penstock's own store."""
    return database.parent.absolute() / "artifacts"


def relocate_artifacts(database: Path) -> None:
    """Point penstock's own store (`.penstock/mlflow`), if its project was moved or copied, to the artifacts beside it.

    MLflow keeps absolute addresses, so a copied project would write into the folder of the original. Other stores are left
    as they are: their artifacts may lie elsewhere.

    Raises:
        sqlite3.Error: the database is damaged, or locked for long.
    """
    here, own = artifacts_beside(database), "/.penstock/mlflow/artifacts"
    if not here.as_uri().endswith(own) or not database.exists() or not here.is_dir():
        return
    with contextlib.closing(sqlite3.connect(database, timeout=30)) as store:
        found = {str(row[0]) for row in store.execute("SELECT DISTINCT artifact_location FROM experiments")}
        for old in (each for each in found - {here.as_uri()} if each.startswith("file:///") and each.endswith(own)):
            with store:
                for table, columns in _ADDRESSES.items():
                    for name in columns:
                        store.execute(
                            f"UPDATE {table} SET {name} = ? || substr({name}, ?) WHERE substr({name}, 1, ?) = ?",
                            (here.as_uri(), len(old) + 1, len(old), old),
                        )
