"""How does penstock speak to MLflow? Only through `MlflowClient` with explicit ids, never through its process-wide current run.

Source: the choice of calls follows measurements on MLflow 3.17: a logged model costs 0.06 s this way, and an equal
(name, time, step, value) is stored once, which makes every resend harmless.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import posixpath
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import mlflow
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.tracking.registry import UnsupportedModelRegistryStoreURIException

from penstock.digest import bytes_digest
from penstock.errors import PenstockError, ServiceError
from penstock.machine.empty_database import copy_database, keep_database
from penstock.progress import announce_wait
from penstock.redact import first_line
from penstock.training.tracking.mlflow_store import artifacts_beside, database_of, relocate_artifacts

__all__ = ["connect", "fit_key", "is_final", "open_client", "patiently"]

T = TypeVar("T")

_FINAL_CODES = frozenset(
    {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "PERMISSION_DENIED"}
)

_TRAINING_VIEW = {"mlflow.experimentKind": "custom_model_development"}
"""Without it MLflow shows a question, or its view for language model applications, which has no metrics."""


def open_client(tracking_uri: str) -> MlflowClient:
    """A client that fails fast, because retrying is the sender's work. A caller's own settings win.

    Raises:
        ServiceError: the address is not of a kind that MLflow supports.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    # Where tqdm is installed, MLflow draws bars of its own into ours.
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # At a run's end MLflow prints its address, with the login of MLFLOW_TRACKING_URI.
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)  # a new database alone logs forty lines
    # They log a traceback of hundreds of lines, or a line, at each try; the sender warns in one line.
    for name in ("mlflow.store.db.utils", "mlflow.system_metrics"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        return MlflowClient(tracking_uri, registry_uri=tracking_uri)
    except UnsupportedModelRegistryStoreURIException as error:
        raise ServiceError(
            f"MLFLOW_TRACKING_URI={tracking_uri} is not of a kind that MLflow supports",
            next_step="correct it: http://HOST:PORT, or sqlite:////PATH/mlflow.db",
        ) from error


def connect(tracking_uri: str, experiment: str, tries: int = 3) -> tuple[MlflowClient, str]:
    """Reach the server (or open the database) and find or create the experiment. Returns (client, experiment id).

    Raises:
        ServiceError: no answer after `tries`, or the server refuses.
    """
    database = database_of(tracking_uri)
    # Beside the database in embedded mode, where MLflow's own default is `./mlruns`; a server decides by itself.
    artifacts = None if database is None else artifacts_beside(database).as_uri()
    for attempt in range(1, tries + 1):
        try:
            with _database_lock(database):
                if database is not None:
                    _make_database(database)
                    relocate_artifacts(database)
                client = open_client(tracking_uri)
                return client, _experiment_id(client, experiment, artifacts)
        except PenstockError:
            raise
        except Exception as error:  # of MLflow, requests or SQLAlchemy; `is_final` classifies it
            if attempt < tries and not is_final(error):
                time.sleep(0.5 * attempt)
                continue
            raise _refusal(tracking_uri, error) from error
    raise AssertionError("unreachable")


def _refusal(tracking_uri: str, error: Exception) -> ServiceError:
    """Name the cause: the database's file, the login, or the server."""
    reason = first_line(error)
    if (database := database_of(tracking_uri)) is not None:
        return ServiceError(
            f"the MLflow database {database} cannot be used: {reason}",
            next_step=f"see what holds it locked (fuser {database}), or whether its disk is full or read-only, or if it is "
            "damaged, restore it, and run the same command again",
        )
    if re.search(r"error code 40[13]\b|UNAUTHENTICATED|PERMISSION_DENIED", reason):
        return ServiceError(
            f"MLflow at {tracking_uri} refuses the login: {reason}",
            next_step="correct MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        )
    return ServiceError(
        f"MLflow at {tracking_uri} does not answer: {reason}",
        next_step="start the server, or unset MLFLOW_TRACKING_URI to keep the records beside the pipeline file",
    )


def fit_key(key: str, limit: int = 250) -> str:
    """Make `key` one MLflow accepts: its alphabet, at most `limit` characters; a shortened key ends in a digest."""
    clean = posixpath.normpath(re.sub(r"[^\w\-. :/]", "_", key).strip("/.") or "_")  # MLflow refuses `a//b` and `../a`
    return clean if len(clean) <= limit else f"{clean[: limit - 9]}-{bytes_digest(key.encode())[:8]}"


def patiently(what: str, call: Callable[[], T], *, for_s: float = 120.0) -> T:
    """Call the server for something the caller must have, again and again while it is away, for `for_s` seconds.

    Raises:
        ServiceError: it did not answer in time, or it refused.
    """
    deadline = time.monotonic() + for_s
    delay_s = 0.5
    with announce_wait(f"MLflow, to {what}"):
        while True:
            try:
                with _long_requests():
                    return call()
            except PenstockError:
                raise
            except Exception as error:  # MLflow and its HTTP library raise many kinds; `is_final` classifies them
                if not is_final(error) and time.monotonic() + delay_s < deadline:
                    time.sleep(delay_s)
                    delay_s = min(10.0, 2 * delay_s)
                    continue
                raise ServiceError(
                    f"MLflow: cannot {what}: {first_line(error)}",
                    next_step="run the same command again, it continues with this step",
                ) from error


@contextlib.contextmanager
def _long_requests() -> Iterator[None]:
    """A model of gigabytes needs more than the seconds a metric may take."""
    before = os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", "")
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "600"
    try:
        yield
    finally:
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = before or "10"


def is_final(error: Exception) -> bool:
    """Whether an exception of MLflow's client is a refusal, which no second try mends."""
    if isinstance(error, MlflowException):
        # a page of a proxy in front of a restarting server is not a refusal, even with status 404
        return error.error_code in _FINAL_CODES and "failed with error code" not in str(error)
    return isinstance(error, (TypeError, KeyError, AttributeError, FileNotFoundError))


def _experiment_id(client: MlflowClient, name: str, artifacts: str | None) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifacts, tags=_TRAINING_VIEW))
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another process was first
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


@contextlib.contextmanager
def _database_lock(database: Path | None) -> Iterator[None]:
    """One process at a time creates the tables: two at once leave a half-migrated SQLite file."""
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with open(database.with_suffix(".lock"), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make_database(database: Path) -> None:
    """Create a SQLite store beside its place and rename it. The caller holds the lock.

    MLflow runs dozens of migrations on a new file; killed among them, it can never open that file again.
    """
    if database.exists():
        return
    making = database.with_name(f"{database.name}.making")
    for left in database.parent.glob(f"{making.name}*"):
        left.unlink()
    name = f"mlflow-{mlflow.__version__}"
    if not copy_database(name, making):
        open_client(f"sqlite:///{making}").search_experiments(max_results=1)
        # MLflow makes its default experiment wherever it finds none; this one's path is of this place.
        keep_database(name, making, before="DELETE FROM experiments")
    os.replace(making, database)
