"""Parameters of the flow, as a Prefect deployment shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from pydantic import BaseModel, Field, PrivateAttr

from penstock.flows.preflight.checks import Preflight
from penstock.flows.spec_file import load_spec
from penstock.tasks.stages import StageName

__all__ = ["RunRequest"]


class RunRequest(BaseModel):
    """The run to begin, or to continue."""

    file: str = Field(description="Path of the pipeline file.")
    overrides: list[str] = Field(default_factory=list, description="Changes of single values, such as `train.epochs=3`.")
    fresh: bool = Field(default=False, description="Start a new run instead of continuing the last one.")
    until: StageName | None = Field(default=None, description="Stop after this stage.")
    _preflight: Preflight | None = PrivateAttr(default=None)
    _on_report: Callable[[dict[str, Any]], object] | None = PrivateAttr(default=None)

    def made_here(self, preflight: Preflight, on_report: Callable[[dict[str, Any]], object] | None = None) -> Self:
        """Give it the file that this process has loaded and checked, and a function to call with every report."""
        self._preflight, self._on_report = preflight, on_report
        return self

    @property
    def on_report(self) -> Callable[[dict[str, Any]], object] | None:
        """The function that this process calls with every report; None in a deployment."""
        return self._on_report

    def preflight(self) -> Preflight:
        """Return the loaded file with its checks; in a deployment, load the file now."""
        if self._preflight is None:
            self._preflight = Preflight(load_spec(self.file, self.overrides))
        return self._preflight
