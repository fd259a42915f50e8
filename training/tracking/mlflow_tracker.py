"""How does MLflow show a run? One MLflow run over all attempts of a penstock run.

Its checkpoints are a table; its one logged model is the registered one. MLflow never changes a parameter: a later attempt's
other value becomes the tag `spec.<path>.attempt_<n>`. The run's name is penstock's id of it without the pipeline's name, which
the experiment has: a list shows the beginning of a name only.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from penstock.ingest.schema import FeedSchema
from penstock.redact import redact_text
from penstock.training.events import Point
from penstock.training.tracking import mlflow_backend
from penstock.training.tracking.mlflow_backend import fit_key, fit_value
from penstock.training.tracking.mlflow_store import TRAINING_VIEW, VIEW_TAG, mlflow_uri
from penstock.training.tracking.sender import Operation, Trouble
from penstock.training.tracking.tracker import OpenRun, Tracker

__all__ = ["MlflowTracker"]


_OPEN_S = 10.0
"""How long a server that was there a moment ago is tried: nothing has been spent yet."""

_OWN_TAGS = {
    "git.commit": "mlflow.source.git.commit",
    "description": "mlflow.note.content",
    "user": "mlflow.user",
    "source": "mlflow.source.name",
    "parent": "mlflow.parentRunId",
}
"""Tags that MLflow's pages show under a name of their own."""

_PER_REQUEST = 100
"""Parameters or tags in one request: MLflow's limit."""

_CHECKPOINTS_FILE = "checkpoints.csv"
"""Artifact that lists the checkpoints of a run that are there."""

_DIGEST_LETTERS = 12
"""The list of runs shows a dataset's digest, and has room for a few letters; the whole digest is a tag of the run."""

_METRIC_COLUMNS = 6
"""In the list of runs. No attributes: beside them a narrow window shows no metric."""


@dataclass(frozen=True)
class _MlflowRun(OpenRun):
    client: MlflowClient
    experiment_id: str


class MlflowTracker(Tracker):
    """The driver's way to one MLflow run, at a server or in a database file beside which the artifacts lie."""

    run: _MlflowRun

    @classmethod
    def default_uri(cls, state_dir: Path) -> str:
        """MLFLOW_TRACKING_URI, else a database below `state_dir`."""
        return mlflow_uri(state_dir)

    @classmethod
    def begin(cls, tracking_uri: str, experiment: str, run_name: str, run_id: str | None, *, begun: bool) -> _MlflowRun:
        """See `Tracker.begin`."""
        client, experiment_id = mlflow_backend.connect(tracking_uri, experiment)
        name = run_name.removeprefix(f"{experiment}-")
        run = mlflow_backend.patiently(
            "open the run",
            lambda: _ensure_run(client, experiment_id, name, run_id, begun=begun),
            for_s=_OPEN_S,
        )
        return _open_run(client, run, "RUNNING")

    @classmethod
    def find(cls, tracking_uri: str, run_id: str) -> _MlflowRun:
        """See `Tracker.find`."""
        client = mlflow_backend.open_client(tracking_uri)
        run = client.get_run(run_id)
        return _open_run(client, run, str(run.info.status))

    @property
    def client(self) -> MlflowClient:
        """Of the run's server."""
        return self.run.client

    @property
    def experiment_id(self) -> str:
        """MLflow's id of the experiment."""
        return self.run.experiment_id

    @property
    def url(self) -> str | None:
        """The run's page on the MLflow server; None in embedded mode."""
        if not self.tracking_uri.startswith("http"):
            return None
        server = redact_text(self.tracking_uri).rstrip("/")
        return f"{server}/#/experiments/{self.experiment_id}/runs/{self.run_id}{TRAINING_VIEW}"

    @property
    def list_url(self) -> str | None:
        """The list of the experiment's runs on the server; None in embedded mode."""
        return self.url.replace(f"/runs/{self.run_id}", "/runs") if self.url is not None else None

    def fit_key(self, key: str) -> str:
        """In MLflow's alphabet."""
        return fit_key(key)


def _ensure_run(client: MlflowClient, experiment_id: str, run_name: str, run_id: str | None, *, begun: bool) -> Run:
    """Reopen `run_id` (status RUNNING), or, if an earlier attempt has `begun`, the run of that name, or create one.

    Names are unique: they are penstock's ids of runs. A driver that was killed before it recorded the new run's id leaves one
    to find by its name.
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
        return client.create_run(experiment_id, run_name=run_name)
    if run.info.status != "RUNNING":
        client.update_run(run.info.run_id, status="RUNNING")
    return run


def _open_run(client: MlflowClient, run: Run, status: str) -> _MlflowRun:
    return _MlflowRun(
        run_id=run.info.run_id,
        transport=MlflowTransport(client, run),
        # the latest values carry their steps; asking for whole histories would cost seconds on a long run
        last_step={metric.key: metric.step for metric in run.data._metric_objs},
        status=status,
        client=client,
        experiment_id=run.info.experiment_id,
    )


class MlflowTransport:
    """Performs the operations of the sender's queue on one run."""

    def __init__(self, client: MlflowClient, run: Run) -> None:
        self._client = client
        self._run_id = run.info.run_id
        self._experiment_id = run.info.experiment_id
        self._params = dict(run.data.params)
        # an attempt of a finished run that measures nothing leaves the time of its end
        self._ended_ms = run.info.end_time if run.info.status == "FINISHED" else None

    def send_points(self, points: list[Point]) -> None:
        """Log the points in one request."""
        if any(not key.startswith("system/") for point in points for key in point.values):
            self._ended_ms = None
        metrics = [Metric(key, value, point.t_ms, point.step) for point in points for key, value in point.values.items()]
        self._client.log_batch(self._run_id, metrics=metrics, synchronous=True)

    def perform(self, operation: Operation) -> None:
        """Call the method of the operation's kind."""
        getattr(self, f"_do_{operation.kind}")(**operation.args)

    def judge(self, error: Exception) -> Trouble:
        """Classify an exception of MLflow's client."""
        return mlflow_backend.judge(error)

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
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            path = Path(folder, os.path.basename(name))
            path.write_bytes(base64.b64decode(content))
            self._client.log_artifact(self._run_id, str(path), os.path.dirname(name) or None)

    def _do_dataset(self, **dataset: Any) -> None:
        self._client.log_inputs(self._run_id, [_dataset_input(**dataset)])

    def _do_checkpoints(self, present: list[dict[str, Any]]) -> None:
        self._do_artifact(_CHECKPOINTS_FILE, base64.b64encode(_checkpoint_table(present).encode()).decode())

    def _do_status(self, status: str) -> None:
        self._client.set_terminated(self._run_id, status, self._ended_ms if status == "FINISHED" else None)
        if status == "FINISHED":
            with contextlib.suppress(MlflowException):  # the columns of a list are not worth a second try
                self._choose_columns()

    def _choose_columns(self) -> None:
        """Let the list of runs show the held-out metrics of this one beside those of others."""
        tags = self._client.get_experiment(self._experiment_id).tags
        view = _list_view(self._client.get_run(self._run_id).data.metrics, tags.get(VIEW_TAG))
        if view is not None and tags.get(VIEW_TAG) != view:
            self._client.set_experiment_tag(self._experiment_id, VIEW_TAG, view)


def _dataset_input(
    name: str, digest: str, uri: str, schema: Mapping[str, Any], context: str, profile: Mapping[str, Any]
) -> DatasetInput:
    """The rows of a split as an input of a run; `schema` is a `FeedSchema` as JSON, `context` the split."""
    dataset = Dataset(
        name[:500],
        digest[:_DIGEST_LETTERS],
        "s3" if uri.startswith("s3://") else "local",
        json.dumps({"uri": uri}),
        schema=_column_schema(FeedSchema.model_validate(schema)),
        profile=json.dumps(profile),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def _column_schema(schema: FeedSchema) -> str:
    """The columns as MLflow's JSON for tables: of one for arrays its page shows nothing."""
    columns = [{"name": column.name, "type": column.type_text, "required": True} for column in schema.columns]
    return json.dumps({"mlflow_colspec": columns})


def _checkpoint_table(checkpoints: Iterable[Mapping[str, Any]]) -> str:
    """Checkpoints as CSV, by step: `name`, `step`, `epoch`, `uri`, and the metrics measured on each."""
    found = sorted(checkpoints, key=lambda entry: int(entry["step"]))
    metrics = sorted({name for entry in found for name in entry["metrics"]}, key=_place)
    into = io.StringIO()
    writer = csv.writer(into, lineterminator="\n")
    writer.writerow(["name", "step", "epoch", *metrics, "uri"])
    for entry in found:
        measured = [entry["metrics"].get(name, "") for name in metrics]
        writer.writerow([entry["name"], entry["step"], entry["epoch"], *measured, entry["uri"]])
    return into.getvalue()


def _list_view(metrics: Iterable[str], before: str | None) -> str | None:
    """Return the state of the list of runs that shows held-out metrics beside each run: the value of its tag. None without any.

    Args:
        before: the value so far, whose metrics stay: the trials of a sweep measure others.
    """
    shown = json.loads(before)["selectedColumns"] if before else []
    known = {name.removeprefix("metrics.`").removesuffix("`") for name in shown}
    held_out = [name for name in sorted({*metrics, *known}, key=_place) if name.startswith(("test/", "val/"))]
    return json.dumps({"selectedColumns": [f"metrics.`{name}`" for name in held_out[:_METRIC_COLUMNS]]}) if held_out else None


def _place(name: str) -> tuple[int, bool, str]:
    """What a person compares first: the test split, then validation; within one the loss comes last."""
    splits = ("test/", "val/", "train/")
    return next((i for i, split in enumerate(splits) if name.startswith(split)), len(splits)), name.endswith("/loss"), name
