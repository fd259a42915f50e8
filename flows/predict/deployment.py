"""How do predictions get onto a schedule? As a Prefect deployment of their flow, beside the one of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import SpecError
from penstock.flows.predict.request import predict_request
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.deploy.deploy import Plan, Work, deploy

__all__ = ["deploy_predictions"]

ENTRYPOINT = "penstock.flows.predict.flow.predict"


def deploy_predictions(
    file: Path, plan: Plan, model: str | None, wanted: Mapping[str, Any], report: Callable[[str], None]
) -> dict[str, Any]:
    """Create the deployment `penstock-predict/<pipeline name>`, or update it. Result as that of `deploy_pipeline`.

    Args:
        file: the pipeline file whose model scores; its project holds the MLflow store if no server is named.
        plan: as in `deploy_pipeline`.
        model: address of a model; by default the pipeline's registered model at its alias.
        wanted: the arguments of `predict_request` besides the model and the file.

    Raises:
        SpecError, ServiceError: as `deploy_pipeline`; SpecError, too, if `model` is None and the pipeline's has no alias,
            and for a format or an option of it that is wrong.
    """
    loaded = load_spec(file, [])
    is_own = model is None
    if model is None:
        register = loaded.spec.register_
        if register.alias is None:
            raise SpecError(
                f"{loaded.file}: its section register names no alias, so there is no model to score with",
                next_step=f"set register.alias, or name the model: --model models:/{register.name or loaded.spec.name}@ALIAS",
            )
        model = f"models:/{register.name or loaded.spec.name}@{register.alias}"
    request = predict_request(model, file=file, **wanted)
    if is_own or request.format is not None:  # for another model the format is known once it is loaded
        from penstock.training.predict.asked import input_options  # it loads torch

        data, name = loaded.spec.data, request.format or loaded.spec.data.format
        input_options(name, data if name == data.format else None, request.options)

    def work() -> Work:
        from penstock.flows.predict.flow import predict

        return Work(predict, ENTRYPOINT, request, f"`{model}` scores `{request.input}`", "output")

    return deploy(loaded, work, plan, report)
