"""What is asked of a flow run that scores rows: its only parameter, which Prefect's page of a deployment shows."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

__all__ = ["PredictRequest"]


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
