"""How does penstock speak to MLflow? Only through `MlflowClient` with explicit ids, never through its process-wide current run.

Source: the choice of calls follows measurements on MLflow 3.17: a logged model costs 0.06 s this way, and an equal
(name, time, step, value) is stored once, which makes every resend harmless.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import importlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import mlflow
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.tracking.registry import UnsupportedModelRegistryStoreURIException

from penstock.errors import PenstockError, ServiceError
from penstock.machine.empty_database import copy_database, keep_database
from penstock.progress import saying_what_is_waited_for
from penstock.redact import first_line
from penstock.training.events import Point
from penstock.training.tracking.mlflow_limits import fit_key, fit_value
from penstock.training.tracking.mlflow_pages import CHECKPOINTS_FILE, checkpoint_table, dataset_input, list_view
from penstock.training.tracking.relocate_mlflow import VIEW_TAG, artifacts_beside, database_of, follow_its_folder
from penstock.training.tracking.sender import Operation, Trouble

__all__ = [
    "MlflowTransport",
    "OpenRun",
    "connect",
    "describe_run",
    "ensure_run",
    "load_sqlite",
    "open_client",
    "patiently",
]


T = TypeVar("T")

_FINAL_CODES = frozenset(
    {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "PERMISSION_DENIED"}
)

_OWN_TAGS = {
    "git.commit": "mlflow.source.git.commit",
    "description": "mlflow.note.content",
    "user": "mlflow.user",
    "source": "mlflow.source.name",
    "parent": "mlflow.parentRunId",
}
"""Tags that MLflow's pages show under a name of their own."""

_TRAINING_VIEW = {"mlflow.experimentKind": "custom_model_development"}
"""Without it MLflow asks, or opens an experiment in its view for language model applications, which shows no metrics."""

_PER_REQUEST = 100
"""Parameters or tags in one request: MLflow's limit."""


class OpenRun(NamedTuple):
    """A run that accepts metrics, and what the server already knows of it."""

    client: MlflowClient
    run_id: str
    experiment_id: str
    params: dict[str, str]
    last_step: dict[str, int]
    """Highest step per metric."""
    ended_ms: int | None = None
    """When it had finished, if it has: a further attempt that finds nothing to do leaves it at that."""


def open_client(tracking_uri: str) -> MlflowClient:
    """A client that fails fast, because retrying is the sender's work. A caller's own settings win.

    Raises:
        ServiceError: the address is of no kind that MLflow knows.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    # Where tqdm is installed, MLflow draws bars of its own into ours.
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # At a run's end MLflow prints its address, with the login that stands in MLFLOW_TRACKING_URI.
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)  # a new database alone says forty lines
    # A traceback of hundreds of lines at each try; the sender says in one what failed, and tries again.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    try:
        return MlflowClient(tracking_uri, registry_uri=tracking_uri)
    except UnsupportedModelRegistryStoreURIException as error:
        raise ServiceError(
            f"MLFLOW_TRACKING_URI={tracking_uri} is of no kind that MLflow knows",
            next_step="correct it: http://HOST:PORT, or sqlite:////PATH/mlflow.db",
        ) from error


def load_sqlite() -> None:
    """Load what the first client of a SQLite store loads: half a second, which may pass while something else is waited for."""
    importlib.import_module("mlflow.store.tracking.sqlalchemy_store")


def connect(tracking_uri: str, experiment: str, tries: int = 3) -> tuple[MlflowClient, str]:
    """Reach the server (or open the database) and find or create the experiment. Returns (client, experiment id).

    Raises:
        ServiceError: no answer after `tries`, or the server refuses.
    """
    for attempt in range(1, tries + 1):
        try:
            with _database_lock(tracking_uri):
                _make_database(tracking_uri)
                if (database := database_of(tracking_uri)) is not None:
                    follow_its_folder(database)
                client = open_client(tracking_uri)
                return client, _experiment_id(client, tracking_uri, experiment)
        except PenstockError:
            raise
        except Exception as error:  # MLflow's own, requests' and SQLAlchemy's; `_judge` tells them apart
            if attempt < tries and _judge(error) is Trouble.PASSING:
                time.sleep(0.5 * attempt)
                continue
            raise _refusal(tracking_uri, error) from error
    raise AssertionError("unreachable")


def _refusal(tracking_uri: str, error: Exception) -> ServiceError:
    """Say what to look at: the database's file, the login, or the server."""
    reason = first_line(error)
    if (database := database_of(tracking_uri)) is not None:
        return ServiceError(
            f"the MLflow database {database} cannot be used: {reason}",
            next_step=f"see what holds it locked (fuser {database}), or whether its disk is full or read-only, and run the "
            "same command again",
        )
    if re.search(r"error code 40[13]\b|UNAUTHENTICATED|PERMISSION_DENIED", reason):
        return ServiceError(
            f"MLflow at {tracking_uri} refuses the login: {reason}",
            next_step="correct MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        )
    return ServiceError(
        f"MLflow at {tracking_uri} does not answer: {_first_cause(error)}",
        next_step="start the server, or unset MLFLOW_TRACKING_URI to keep the records beside the pipeline file",
    )


def _first_cause(error: BaseException) -> str:
    """What the first of a chain of exceptions says: each library around it only quotes it, in ever longer words."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return first_line(error)


def ensure_run(client: MlflowClient, experiment_id: str, run_name: str, run_id: str | None, *, begun: bool) -> OpenRun:
    """Reopen `run_id` (status RUNNING), or, if an earlier attempt has `begun`, the run of that name, or create one.

    Names are unique: they are penstock's ids of runs. A driver killed before it could note the new run's id leaves one to be
    found.
    """
    run: Run | None = None
    if run_id is not None:
        with contextlib.suppress(MlflowException):
            found = client.get_run(run_id)
            run = found if found.info.lifecycle_stage == "active" else None
    if run is None and begun:
        named = client.search_runs([experiment_id], f"attributes.run_name = '{run_name}'", max_results=1)
        run = next(iter(named), None)
    if run is None:
        run = client.create_run(experiment_id, run_name=run_name)
    elif run.info.status != "RUNNING":
        client.update_run(run.info.run_id, status="RUNNING")
    return describe_run(client, run)


def describe_run(client: MlflowClient, run: Run) -> OpenRun:
    """What the server knows of `run`."""
    # the latest values carry their steps; asking for whole histories would cost seconds on a long run
    last_step = {metric.key: metric.step for metric in run.data._metric_objs}
    ended_ms = run.info.end_time if run.info.status == "FINISHED" else None
    return OpenRun(client, run.info.run_id, run.info.experiment_id, dict(run.data.params), last_step, ended_ms)


class MlflowTransport:
    """Does what the sender's queue asks for, on one run."""

    def __init__(self, run: OpenRun) -> None:
        self._client = run.client
        self._run_id = run.run_id
        self._experiment_id = run.experiment_id
        self._params = dict(run.params)
        self._ended_ms = run.ended_ms
        self._checkpoints: dict[str, dict[str, Any]] = {}

    def send_points(self, points: list[Point]) -> None:
        """One request for all points."""
        if any(not key.startswith("system/") for point in points for key in point.values):
            self._ended_ms = None
        metrics = [Metric(key, value, point.t_ms, point.step) for point in points for key, value in point.values.items()]
        self._client.log_batch(self._run_id, metrics=metrics, synchronous=True)

    def perform(self, operation: Operation) -> None:
        """Dispatch by kind to the method of that name."""
        getattr(self, f"_do_{operation.kind}")(**operation.args)

    def judge(self, error: Exception) -> Trouble:
        """See `Trouble`."""
        return _judge(error)

    def _do_tags(self, tags: dict[str, str]) -> None:
        entities = [RunTag(_OWN_TAGS.get(key) or fit_key(key), fit_value(value, 8000)) for key, value in tags.items()]
        for start in range(0, len(entities), _PER_REQUEST):
            self._client.log_batch(self._run_id, tags=entities[start : start + _PER_REQUEST], synchronous=True)

    def _do_params(self, params: dict[str, str], attempt: int) -> None:
        """A parameter cannot change in MLflow: what another attempt set otherwise becomes a tag of this attempt."""
        fitted = {fit_key(key): fit_value(value, 6000) for key, value in params.items()}
        new = [Param(key, value) for key, value in fitted.items() if key not in self._params]
        for start in range(0, len(new), _PER_REQUEST):
            self._client.log_batch(self._run_id, params=new[start : start + _PER_REQUEST], synchronous=True)
        changed = {f"{key}.attempt_{attempt}": value for key, value in fitted.items() if self._params.get(key, value) != value}
        if changed:
            self._do_tags({f"spec.{key.removeprefix('spec.')}": value for key, value in changed.items()})
        self._params = {**fitted, **self._params}

    def _do_artifact(self, name: str, content: str) -> None:
        with _temporary_file(name, base64.b64decode(content)) as path:
            self._client.log_artifact(self._run_id, str(path), os.path.dirname(name) or None)

    def _do_dataset(self, **dataset: Any) -> None:
        self._client.log_inputs(self._run_id, [dataset_input(**dataset)])

    def _do_checkpoint(self, **checkpoint: Any) -> None:
        self._checkpoints[checkpoint["name"]] = checkpoint
        self._do_artifact(CHECKPOINTS_FILE, base64.b64encode(checkpoint_table(self._checkpoints.values()).encode()).decode())

    def _do_checkpoints(self, present: list[dict[str, Any]]) -> None:
        self._checkpoints = {checkpoint["name"]: checkpoint for checkpoint in present}
        self._do_artifact(CHECKPOINTS_FILE, base64.b64encode(checkpoint_table(present).encode()).decode())

    def _do_status(self, status: str) -> None:
        self._client.set_terminated(self._run_id, status, self._ended_ms if status == "FINISHED" else None)
        if status == "FINISHED":
            with contextlib.suppress(MlflowException):  # how a list looks is worth no second try
                self._choose_columns()

    def _choose_columns(self) -> None:
        """Let the list of runs show the held-out metrics of this one."""
        view = list_view(self._client.get_run(self._run_id).data.metrics)
        if view is not None and self._client.get_experiment(self._experiment_id).tags.get(VIEW_TAG) != view:
            self._client.set_experiment_tag(self._experiment_id, VIEW_TAG, view)


def patiently(what: str, call: Callable[[], T], *, for_s: float = 120.0) -> T:
    """Call the server for something the caller must have, again and again while it is away, for `for_s` seconds.

    Raises:
        ServiceError: it did not answer in time, or it refused.
    """
    deadline = time.monotonic() + for_s
    delay_s = 0.5
    with saying_what_is_waited_for(f"MLflow, to {what}"):
        while True:
            try:
                with _long_requests():
                    return call()
            except PenstockError:
                raise
            except Exception as error:  # MLflow and its HTTP library raise many kinds; `_judge` tells them apart
                if _judge(error) is Trouble.PASSING and time.monotonic() + delay_s < deadline:
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


def _judge(error: Exception) -> Trouble:
    if isinstance(error, MlflowException):
        # a page of a proxy in front of a restarting server is no refusal, though it may say 404
        from_proxy = "failed with error code" in str(error)
        return Trouble.FINAL if error.error_code in _FINAL_CODES and not from_proxy else Trouble.PASSING
    return Trouble.FINAL if isinstance(error, (TypeError, KeyError, AttributeError, FileNotFoundError)) else Trouble.PASSING


def _experiment_id(client: MlflowClient, tracking_uri: str, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, _artifact_location(tracking_uri), tags=_TRAINING_VIEW))
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another process was first
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def _artifact_location(tracking_uri: str) -> str | None:
    """Beside the database in embedded mode, where MLflow's own default is `./mlruns`; a server decides by itself."""
    database = database_of(tracking_uri)
    return None if database is None else artifacts_beside(database).as_uri()


@contextlib.contextmanager
def _database_lock(tracking_uri: str) -> Iterator[None]:
    """One process at a time creates the tables: two at once leave a half-migrated SQLite file."""
    database = database_of(tracking_uri)
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with open(database.with_suffix(".lock"), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make_database(tracking_uri: str) -> None:
    """Create a SQLite store beside its place and rename it. The caller holds the lock.

    MLflow runs dozens of migrations on a new file; killed among them, it can never open that file again.
    """
    database = database_of(tracking_uri)
    if database is None or database.exists():
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


@contextlib.contextmanager
def _temporary_file(name: str, content: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = Path(folder, os.path.basename(name))
        path.write_bytes(content)
        yield path
