"""What does MLflow learn of a run? One MLflow run over all attempts of a penstock run.

Its checkpoints are a table; its one logged model is what is registered. MLflow never changes a parameter: a later attempt's
other value becomes the tag `spec.<path>.attempt_<n>`. The run's name is penstock's id of it without the pipeline's name, which
the experiment has: a list shows the beginning of a name only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from mlflow.tracking import MlflowClient

from penstock.redact import redact_text
from penstock.training.tracking import mlflow_backend
from penstock.training.tracking.local_page import page_port
from penstock.training.tracking.mlflow_limits import fit_key
from penstock.training.tracking.queued_tracker import OpenRun, QueuedTracker
from penstock.training.tracking.relocate_mlflow import TRAINING_VIEW, database_of, mlflow_uri

__all__ = ["MlflowTracker"]


_OPEN_S = 10.0
"""How long a server that was there a moment ago is tried: nothing has been spent yet."""


@dataclass(frozen=True)
class _MlflowRun(OpenRun):
    client: MlflowClient
    experiment_id: str


class MlflowTracker(QueuedTracker[_MlflowRun]):
    """The driver's way to one MLflow run, at a server or in a database file beside which the artifacts lie."""

    @classmethod
    def load(cls) -> None:
        """Load SQLite's store, where no server is named."""
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow_backend.load_sqlite()

    @classmethod
    def default_uri(cls, state_dir: Path) -> str:
        """MLFLOW_TRACKING_URI, else a database below `state_dir`."""
        return mlflow_uri(state_dir)

    @classmethod
    def begin(cls, tracking_uri: str, experiment: str, run_name: str, run_id: str | None, *, begun: bool) -> _MlflowRun:
        """See `QueuedTracker.begin`."""
        client, experiment_id = mlflow_backend.connect(tracking_uri, experiment)
        name = run_name.removeprefix(f"{experiment}-")
        run = mlflow_backend.patiently(
            "open the run",
            lambda: mlflow_backend.ensure_run(client, experiment_id, name, run_id, begun=begun),
            for_s=_OPEN_S,
        )
        return _described(run, "RUNNING")

    @classmethod
    def find(cls, tracking_uri: str, run_id: str) -> _MlflowRun:
        """See `QueuedTracker.find`."""
        client = mlflow_backend.open_client(tracking_uri)
        run = client.get_run(run_id)
        return _described(mlflow_backend.describe_run(client, run), str(run.info.status))

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
        return self._page_at(redact_text(self.tracking_uri).rstrip("/")) if self.tracking_uri.startswith("http") else None

    @property
    def local_url(self) -> str | None:
        """See `HasLocalPage`."""
        database = database_of(self.tracking_uri)
        return self._page_at(f"http://127.0.0.1:{page_port(database.parent / 'port')}") if database is not None else None

    @property
    def list_url(self) -> str | None:
        """See `HasRunList`."""
        return self.url.replace(f"/runs/{self.run_id}", "/runs") if self.url is not None else None

    def _page_at(self, server: str) -> str:
        return f"{server}/#/experiments/{self.experiment_id}/runs/{self.run_id}{TRAINING_VIEW}"

    def fit_key(self, key: str) -> str:
        """In MLflow's alphabet."""
        return fit_key(key)


def _described(run: mlflow_backend.OpenRun, status: str) -> _MlflowRun:
    return _MlflowRun(
        run_id=run.run_id,
        transport=mlflow_backend.MlflowTransport(run),
        last_step=run.last_step,
        status=status,
        client=run.client,
        experiment_id=run.experiment_id,
    )
