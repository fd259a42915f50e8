"""What is a flow run asked to do? The form that a Prefect deployment shows."""

from __future__ import annotations

from pydantic import BaseModel, Field

from penstock.tasks.stages import StageName

__all__ = ["RunRequest"]


class RunRequest(BaseModel):
    """What to run, or to continue."""

    file: str = Field(description="Path of the pipeline file.")
    overrides: list[str] = Field(default_factory=list, description="Changes of single values, such as `train.epochs=3`.")
    fresh: bool = Field(default=False, description="Start a new run instead of continuing the last one.")
    until: StageName | None = Field(default=None, description="Stop after this stage.")
