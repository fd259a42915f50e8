"""How are scored rows logged to MLflow? As one run beside the one that trained the model, linked to the model."""

from __future__ import annotations

from collections.abc import Mapping

from mlflow.entities import LoggedModelInput, Metric, Param, RunTag
from mlflow.entities.dataset import Dataset
from mlflow.entities.dataset_input import DatasetInput

from penstock.training.registry.load import FetchedModel
from penstock.training.tracking.mlflow_backend import fit_value, open_client, patiently

__all__ = ["log_predictions"]

_PATIENCE_S = 10.0
"""The rows are scored already, so a server that is away is not waited for."""


def log_predictions(
    model: FetchedModel,
    run_name: str,
    *,
    source: str,
    data_digest: str,
    params: Mapping[str, str],
    tags: Mapping[str, str],
    metrics: Mapping[str, float],
    begun_ms: int,
) -> str:
    """Log a run in the experiment of the run that trained the model; returns MLflow's id of it.

    Args:
        model: a registered version.
        source: where the rows are from.
        data_digest: of their files.
        begun_ms: when scoring began, in ms since 1970.

    Raises:
        ServiceError: MLflow does not answer, or refuses.
    """
    assert model.tracking_uri is not None and model.run_id is not None
    client, trained_by = open_client(model.tracking_uri), model.run_id

    def create() -> str:
        experiment = client.get_run(trained_by).info.experiment_id
        return str(client.create_run(experiment, begun_ms, run_name=run_name).info.run_id)

    def describe() -> None:
        client.log_batch(
            run_id,
            metrics=[Metric(key, value, begun_ms, 0) for key, value in metrics.items()],
            params=[Param(key, fit_value(value, 6000)) for key, value in params.items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
        )
        rows = Dataset(name="input", digest=data_digest, source_type="uri", source=source)
        linked = [LoggedModelInput(model.model_id)] if model.model_id else []
        client.log_inputs(run_id, [DatasetInput(rows)], linked)
        client.set_terminated(run_id, "FINISHED")

    run_id = patiently("log the predictions", create, for_s=_PATIENCE_S)
    patiently("describe the predictions", describe, for_s=_PATIENCE_S)
    return run_id
