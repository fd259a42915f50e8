"""How does the command score rows? Servers up, flow called in this process, and its end turned into a result or an error."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import SpecError
from penstock.flows.predict.request import PredictRequest
from penstock.flows.servers.services import check_mlflow_answers, prefect_api, prepare_environment
from penstock.flows.spec_file import load_spec, option_values, refuse_secrets
from penstock.flows.verbs.run import raise_interrupted_on_stop
from penstock.machine.stopping import StopRequest, stopping_on_signals
from penstock.storage import url_problem
from penstock.stores import is_local

__all__ = ["predict", "predict_request"]


def predict(
    model: str,
    source: str,
    output: str,
    *,
    columns: Sequence[str] = (),
    format: str | None = None,
    options: Sequence[str] = (),
    gpus: bool = False,
    file: Path | None = None,
) -> dict[str, Any]:
    """Score the rows of `source` in this process and return what `penstock predict --json` prints.

    Args:
        model: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, a run, or the folder of a model.
        source: a file, a folder, a glob, or a URL of one; a table, a query or a function, as `data.train` names them.
        output: a folder or a URL of one.
        columns: of the source, to be kept; empty for all.
        format: of the source, if it is not that of the one the model was trained on.
        options: of the format, texts `name=value`, as a pipeline file has them under `data.<format>`.
        gpus: score on the cluster's GPUs.
        file: a pipeline file, whose project has the model. By default the project that the working directory lies in.

    Raises:
        PenstockError: what stopped it; its attribute `result` holds what was reached.
    """
    prepare_environment()
    request = predict_request(model, source, output, columns=columns, format=format, options=options, gpus=gpus, file=file)
    check_mlflow_answers()
    print(f"{model}: starting", file=sys.stderr, flush=True)
    stopping = StopRequest()
    state_dir = Path(request.state_dir)
    with raise_interrupted_on_stop(stopping), stopping_on_signals(stopping), prefect_api(state_dir, stopping.check):
        # Prefect reads its settings when imported, so it comes after the server's address is known.
        from penstock.flows.predict.flow import predict as predict_flow
        from penstock.flows.run.flow_runs import flow_result

        return flow_result(lambda: predict_flow(request, return_state=True))


def predict_request(
    model: str,
    source: str,
    output: str,
    *,
    columns: Sequence[str] = (),
    format: str | None = None,
    options: Sequence[str] = (),
    gpus: bool = False,
    file: Path | None = None,
) -> PredictRequest:
    """The arguments of `predict` as a flow run takes them, which may run in another folder: paths are absolute.

    Raises:
        SpecError: a location is a URL that is written wrongly, or it or an option holds a secret.
    """
    for called, location in (("INPUT", source), ("--output", output)):
        if problem := url_problem(location):
            raise SpecError(f"{called}: {location!r}: {problem}", next_step=f"correct {called}")
        refuse_secrets(called, location)
    return PredictRequest(
        model=os.path.abspath(model) if Path(model).is_dir() else model,
        input=_found(source),
        output=_absolute(output),
        columns=list(columns),
        format=format,
        options=option_values(options),
        base_dir=os.getcwd(),
        gpus=gpus,
        state_dir=str(_state_dir(file)),
    )


def _found(source: str) -> str:
    """Return the whole path of what exists. Other text may name a table, a query or a function, as the format decides."""
    path = _absolute(source)
    return path if os.path.exists(path) or (glob.has_magic(path) and glob.glob(path)) else source


def _absolute(uri: str) -> str:
    return os.path.abspath(os.path.expanduser(uri.removeprefix("file://"))) if is_local(uri) else uri


def _state_dir(file: Path | None) -> Path:
    """Of the pipeline's project; without one, of the project around the working directory, else of that directory."""
    if file is not None:
        return load_spec(file).state_dir
    here = Path.cwd()
    return next(
        (folder / ".penstock" for folder in (here, *here.parents) if (folder / ".penstock").is_dir()), here / ".penstock"
    )
