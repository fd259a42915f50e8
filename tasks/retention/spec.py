"""The section `retention` of the pipeline file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.config import PluginSection

__all__ = ["RetentionSpec"]


class RetentionSpec(PluginSection):
    """Which runs keep their rows, checkpoints and answers (docs/retention.md). `penstock run` applies it when it is done."""

    keep_runs: Annotated[int, Field(ge=1)] = 5
    """How many of the newest runs. A sweep counts as one."""
    keep_days: Annotated[float, Field(ge=0, le=36_500, allow_inf_nan=False)] = 30
    """Days since it was last worked on after which a run goes even if it is one of the newest; the newest of all never goes."""
