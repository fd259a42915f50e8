"""What did the transforms learn? Plain JSON, exact to the bit, that they can be applied from anywhere."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from penstock.config import Section
from penstock.digest import digest_of
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.transform_spec import TransformSpec

__all__ = ["FittedPreprocess", "FittedTransform"]


class FittedTransform(Section):
    """A transform with what it learnt, in the order of its columns."""

    step: TransformSpec
    columns: tuple[ColumnState, ...] = ()
    """Empty for a transform that learns nothing."""


class FittedPreprocess(Section):
    """All transforms of a pipeline, fitted on its train split."""

    version: Literal[1] = 1
    steps: tuple[FittedTransform, ...]
    classes: tuple[str, ...] | None = None
    """Names of the label's classes in the order of their indices, if a label encoder learnt them."""
    num_classes: int | None = None

    @cached_property
    def digest(self) -> str:
        """Digest of transforms and state: 32 hex characters."""
        return digest_of(self.model_dump(mode="json"))
