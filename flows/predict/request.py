"""The parameter of a flow run that scores rows, which Prefect's page of a deployment shows, and how a command makes it."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from penstock.errors import SpecError
from penstock.flows.spec_file import load_spec, option_values, refuse_secrets
from penstock.storage import url_problem
from penstock.stores import is_local

__all__ = ["PredictRequest", "predict_request"]


class PredictRequest(BaseModel):
    """Which rows to score, by which model."""

    model: str = Field(description="models:/NAME@ALIAS, models:/NAME/VERSION, a run, or the folder of a model.")
    input: str = Field(
        description="A file, a folder, a glob, or a URL of one; a table, a query, or a function that gives rows."
    )
    output: str = Field(description="A folder or a URL of one, which penstock alone writes to.")
    columns: list[str] = Field(default_factory=list, description="Columns of the input to keep; empty for all.")
    format: str | None = Field(default=None, description="Of the input, if it is not that of what was trained on.")
    options: dict[str, Any] = Field(default_factory=dict, description="Of the format, as under data.<format>.")
    base_dir: str = Field(default="", description="Folder that paths in the input and in the options start from.")
    gpus: bool = Field(default=False, description="Score on the cluster's GPUs, one for each process.")
    state_dir: str = Field(description="Folder of the embedded servers and of their MLflow store.")


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
    """Make the request of a flow run, which may run in another folder: paths are absolute.

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
