"""Where do `mlflow.log_metric` and `mlflow.log_metrics` of user code go, on a training worker? Where `penstock.log` goes.

MLflow by itself would make a database in the worker's folder, for the worker knows no address of a tracking server; and a point
that went to a server from here would come twice after a kill.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from penstock.errors import TrainingError
from penstock.training.own_values import record
from penstock.usercode.capture import UserCode

__all__ = ["take_over_mlflow"]

_REFUSED = (
    "start_run", "log_param", "log_params", "log_artifact", "log_artifacts", "log_text", "log_dict", "log_figure",
    "log_image", "log_table", "log_model", "log_input", "set_tag", "set_tags", "set_experiment", "autolog",
)  # fmt: skip


def take_over_mlflow(code: UserCode) -> None:
    """Send the metrics that `code` logs with MLflow to the run, if it imports MLflow at all. Before the code is loaded."""
    if not any(name.startswith("mlflow") for name in code.versions):
        return
    import mlflow

    def log_metric(key: str, value: Any, step: int | None = None, *_more: Any, **_options: Any) -> None:
        _say_where(step)
        record(key, value, as_named=True)

    def log_metrics(metrics: Mapping[str, Any], step: int | None = None, *_more: Any, **_options: Any) -> None:
        _say_where(step)
        for key, value in metrics.items():
            record(key, value, as_named=True)

    mlflow.log_metric, mlflow.log_metrics = log_metric, log_metrics
    for name in _REFUSED:
        setattr(mlflow, name, _refusing(name))


def _say_where(step: int | None) -> None:
    if step is not None:
        warnings.warn(
            "mlflow is given a step for a metric: on a training worker it is charted at the step of the training (said once)",
            stacklevel=3,
            category=UserWarning,
        )


def _refusing(name: str) -> Any:
    def refuse(*_given: Any, **_options: Any) -> None:
        raise TrainingError(
            f"mlflow.{name} is called on a training worker, where the run is written by penstock",
            next_step="take mlflow.log_metric or penstock.log for values; spec, checkpoints and model are in the run anyway",
        )

    return refuse
