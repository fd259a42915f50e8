"""The parameter of a flow run that scores rows, which Prefect's page of it shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

from penstock.errors import SpecError
from penstock.flows.spec_file import load_spec, refuse_secrets
from penstock.storage import Storage, url_problem

__all__ = ["PredictRequest", "state_folder"]


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
    gpus: bool = Field(default=False, description="Score on the cluster's GPUs, one for each process.")
    state_dir: str = Field(description="Folder of the embedded servers and of their MLflow store.")

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        """Make folders of this machine absolute. Raises SpecError for a wrong URL and a secret."""
        for called, location in (("INPUT", self.input), ("--output", self.output)):
            if problem := url_problem(location):
                raise SpecError(f"{called}: {location!r}: {problem}", next_step=f"correct {called}")
            refuse_secrets(called, location)
        self.model = os.path.abspath(self.model) if Path(self.model).is_dir() else self.model
        self.output = Storage(os.path.expanduser(self.output)).root
        return self


def state_folder(file: Path | None) -> Path:
    """Return that of the pipeline's project; without one, of the project around the working directory, else of the latter."""
    if file is not None:
        return load_spec(file).state_dir
    here = Path.cwd()
    return next(
        (folder / ".penstock" for folder in (here, *here.parents) if (folder / ".penstock").is_dir()), here / ".penstock"
    )
