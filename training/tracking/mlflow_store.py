"""Where is a pipeline's own MLflow store, where do its artifacts lie, and at which address does `penstock ui` show it?"""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
from pathlib import Path

__all__ = [
    "TRAINING_VIEW",
    "VIEW_KEY",
    "VIEW_TAG",
    "artifacts_beside",
    "database_of",
    "mlflow_uri",
    "page_port",
    "relocate_artifacts",
]


_ADDRESSES = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}
"""Columns that hold an artifact's address, as a URI."""

_HOST = "127.0.0.1"

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


def page_port(memory: Path, *, to_bind: bool = False) -> int:
    """The port of MLflow's page: that of the last time, so that links stay valid, else a free one, noted in `memory`.

    Args:
        memory: the file that holds the port.
        to_bind: a server will listen there at once: choose another port if this one is taken.
    """
    try:
        port = int(memory.read_text())
    except (OSError, ValueError):
        port = 0
    if not 0 < port < 1 << 16 or (to_bind and _bound(port) is None):
        port = _bound(0) or 0
        with contextlib.suppress(OSError):  # in a folder that cannot be written the port changes each time
            memory.parent.mkdir(parents=True, exist_ok=True)
            memory.write_text(str(port))
    return port


def _bound(port: int) -> int | None:
    """The port that a server could bind to; None if it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a closed one must not block the port
        try:
            probe.bind((_HOST, port))
        except OSError:
            return None
        return int(probe.getsockname()[1])
