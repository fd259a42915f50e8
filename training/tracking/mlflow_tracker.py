"""How does MLflow show a run? One MLflow run over all attempts of a penstock run.

Its one logged model is the registered one. MLflow never changes a parameter: a later attempt's other value becomes the tag
`spec.<path>.attempt_<n>`. The run's name is penstock's id of it without the pipeline's name, which the experiment has: a list
shows the beginning of a name only.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking import MlflowClient

from penstock.ingest.schema import FeedSchema
from penstock.redact import redact_text
from penstock.training.events import Point
from penstock.training.tracking import mlflow_backend
from penstock.training.tracking.mlflow_backend import fit_key
from penstock.training.tracking.mlflow_store import TRAINING_VIEW, mlflow_uri
from penstock.training.tracking.sender import OpenRun, Operation
from penstock.training.tracking.tracker import Tracker

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

_DIGEST_LETTERS = 12
"""The list of runs shows a dataset's digest, and has room for a few letters; the whole digest is a tag of the run."""


class MlflowTracker(Tracker):
    """The driver's way to one MLflow run, at a server or in a database file beside which the artifacts lie."""

    run: MlflowRun

    @classmethod
    def default_uri(cls, state_dir: Path) -> str:
        """MLFLOW_TRACKING_URI, else a database below `state_dir`."""
        return mlflow_uri(state_dir)

    @classmethod
    def begin(cls, tracking_uri: str, experiment: str, run_name: str, run_id: str | None, *, begun: bool) -> MlflowRun:
        """See `Tracker.begin`."""
        client, experiment_id = mlflow_backend.connect(tracking_uri, experiment)
        name = run_name.removeprefix(f"{experiment}-")
        run = mlflow_backend.patiently(
            "open the run", lambda: _ensure_run(client, experiment_id, name, run_id, begun=begun), for_s=_OPEN_S
        )
        return MlflowRun(client, run)

    @classmethod
    def find(cls, tracking_uri: str, run_id: str) -> MlflowRun:
        """See `Tracker.find`."""
        client = mlflow_backend.open_client(tracking_uri)
        return MlflowRun(client, client.get_run(run_id))

    @property
    def url(self) -> str | None:
        """The run's page on the MLflow server; None in embedded mode."""
        if not self.tracking_uri.startswith("http"):
            return None
        server = redact_text(self.tracking_uri).rstrip("/")
        return f"{server}/#/experiments/{self.run.experiment_id}/runs/{self.run_id}{TRAINING_VIEW}"

    def fit_key(self, key: str) -> str:
        """In MLflow's alphabet."""
        return fit_key(key)

    @contextlib.contextmanager
    def charting_machine(self) -> Iterator[None]:
        """Chart the load of this machine every 10 s, by MLflow's own thread; it ends when the server does not answer."""
        monitor = SystemMetricsMonitor(self.run_id, resume_logging=True, tracking_uri=self.tracking_uri)
        monitor.start()
        try:
            yield
        finally:
            monitor.finish()


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


class MlflowRun(OpenRun):
    """A run at MLflow."""

    def __init__(self, client: MlflowClient, run: Run) -> None:
        self.client, self.run_id, self.experiment_id = client, run.info.run_id, run.info.experiment_id
        self.status = str(run.info.status)
        # the latest values carry their steps; asking for whole histories would cost seconds on a long run
        self.last_step = {metric.key: metric.step for metric in run.data._metric_objs}
        self._params = dict(run.data.params)
        # an attempt of a finished run that measures nothing leaves the time of its end
        self._ended_ms = run.info.end_time if run.info.status == "FINISHED" else None

    def send_points(self, points: list[Point]) -> None:
        """Log the points in one request."""
        self._ended_ms = None
        metrics = [Metric(key, value, point.t_ms, point.step) for point in points for key, value in point.values.items()]
        self.client.log_batch(self.run_id, metrics=metrics, synchronous=True)

    def perform(self, operation: Operation) -> None:
        """Call the method of the operation's kind."""
        getattr(self, f"_do_{operation.kind}")(**operation.args)

    def is_final(self, error: Exception) -> bool:
        """See `OpenRun.is_final`."""
        return mlflow_backend.is_final(error)

    def _do_tags(self, tags: dict[str, str]) -> None:
        entities = [RunTag(_OWN_TAGS.get(key) or fit_key(key), value[:8000]) for key, value in tags.items()]
        for start in range(0, len(entities), _PER_REQUEST):
            self.client.log_batch(self.run_id, tags=entities[start : start + _PER_REQUEST], synchronous=True)

    def _do_params(self, params: dict[str, str], attempt: int) -> None:
        """A parameter cannot change in MLflow: what another attempt set otherwise becomes a tag of this attempt."""
        fitted = {fit_key(key): value[:6000] for key, value in params.items()}
        new = [Param(key, value) for key, value in fitted.items() if key not in self._params]
        for start in range(0, len(new), _PER_REQUEST):
            self.client.log_batch(self.run_id, params=new[start : start + _PER_REQUEST], synchronous=True)
        changed = {f"{key}.attempt_{attempt}": value for key, value in fitted.items() if self._params.get(key, value) != value}
        if changed:
            self._do_tags({f"spec.{key.removeprefix('spec.')}": value for key, value in changed.items()})
        self._params = {**fitted, **self._params}

    def _do_artifact(self, name: str, content: str) -> None:
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            path = Path(folder, os.path.basename(name))
            path.write_bytes(base64.b64decode(content))
            self.client.log_artifact(self.run_id, str(path), os.path.dirname(name) or None)

    def _do_dataset(
        self, name: str, digest: str, uri: str, schema: Mapping[str, Any], context: str, profile: Mapping[str, Any]
    ) -> None:
        """Log the rows of a split as an input; `schema` is a `FeedSchema` as JSON, `context` the split."""
        # As MLflow's JSON for tables: of one for arrays its page shows nothing.
        columns = [
            {"name": column.name, "type": column.type_text, "required": True}
            for column in FeedSchema.model_validate(schema).columns
        ]
        dataset = Dataset(
            name[:500],
            digest[:_DIGEST_LETTERS],
            "s3" if uri.startswith("s3://") else "local",
            json.dumps({"uri": uri}),
            schema=json.dumps({"mlflow_colspec": columns}),
            profile=json.dumps(profile),
        )
        self.client.log_inputs(self.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", context)])])

    def _do_status(self, status: str) -> None:
        self.client.set_terminated(self.run_id, status, self._ended_ms if status == "FINISHED" else None)
