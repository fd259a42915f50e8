"""Which runs of a pipeline are kept?"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.config import Section

__all__ = ["RetentionSpec"]


class RetentionSpec(Section):
    """Which runs keep their rows, checkpoints and answers (docs/room.md). `penstock run` applies it when it is done."""

    keep_runs: Annotated[int, Field(ge=1)] = 5
    """How many of the newest runs. A sweep counts as one."""
    keep_days: Annotated[float, Field(gt=0)] = 30
    """Days since it was last worked on after which a run goes even if it is one of the newest; the newest of all never goes."""
    mlflow: bool = True
    """Whether the artifacts and the versions without an alias of runs that go are deleted from `.penstock/mlflow`, too."""
