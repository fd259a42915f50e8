"""What did the preprocessing steps learn? Plain JSON, exact to the bit, that the same steps can be applied from anywhere."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from penstock.config import Section
from penstock.digest import digest_of
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.steps import PreprocessStep

__all__ = ["FittedPreprocess", "FittedStep"]


class FittedStep(Section):
    """A step with what it learnt, in the order of its columns."""

    step: PreprocessStep
    columns: tuple[ColumnState, ...] = ()
    """Empty for a step that learns nothing."""


class FittedPreprocess(Section):
    """All steps of a pipeline, fitted on its train split."""

    version: Literal[1] = 1
    steps: tuple[FittedStep, ...]
    classes: tuple[str, ...] | None = None
    """Names of the label's classes in the order of their indices, if a label encoder learnt them."""
    num_classes: int | None = None

    @cached_property
    def digest(self) -> str:
        """Digest of steps and state: 32 hex characters."""
        return digest_of(self.model_dump(mode="json"))
