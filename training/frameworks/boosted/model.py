"""How are grown trees loaded and measured, as a `TrainedModel`? Without Ray."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.ingest.schema import FeedSchema
from penstock.training.frameworks.boosted.table import FeatureTable, Floats
from penstock.training.model import ClassScores, Predicts, TrainedModel

__all__ = ["BoostedModel", "BoostedPredicts", "Forest", "loss_of"]

SMALLEST = 1e-7
"""A probability of 0 would make an infinite loss of one row."""


class Forest(Protocol):
    """Grown trees of a file."""

    rounds: int
    names: list[str]
    """Of the features."""
    objective: tuple[str, int]
    """The library's name of it, and the number of trees in a round."""
    classes: tuple[str, ...] | None
    """Names of the label's classes, in the order of the predictions; None if the file does not name them."""

    def predict(self, matrix: Floats) -> NDArray[Any]:
        """Predict any rows: probabilities or values, [rows] or [rows, classes]."""

    def gains(self) -> NDArray[np.float64]:
        """Sum the gains of the splits at each feature, [features]."""


class BoostedPredicts(Predicts):
    """How trees predict."""

    @property
    def predicts(self) -> ClassScores:
        """Probabilities."""
        return "probabilities"


class BoostedModel(BoostedPredicts, TrainedModel):
    """Grown trees."""

    def __init__(self, schema: FeedSchema, forest: Forest) -> None:
        self._schema, self._forest, self._table = schema, forest, FeatureTable(schema)

    def importance(self) -> dict[str, float]:
        """Sum the gains of the splits at each column, as shares of 1."""
        return self._table.by_column(self._forest.gains())

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Compute the mean cross-entropy of classes, or squared error of numbers."""
        label = batch[self._table.label]
        return loss_of(self.predict(batch, len(label)), label.reshape(-1), self._schema)

    def predict(self, batch: dict[str, Tensor], rows: int) -> Tensor:
        """Predict probabilities or values, float32: [rows] or [rows, classes]."""
        return torch.from_numpy(self._forest.predict(self._table.matrix(batch)).astype(np.float32, copy=False))


def loss_of(output: Tensor, label: Tensor, schema: FeedSchema) -> Tensor:
    """Compute the mean cross-entropy or squared error, whatever the objective, so that runs compare.

    Args:
        output: probabilities or values, [rows] or [rows, classes].
        label: class indices or numbers, [rows].
        schema: of the rows; names the kind of label.
    """
    if schema.num_classes is None:
        return torch.mean((output.double() - label.double()) ** 2)
    index = label.long()
    right = torch.where(index == 1, output, 1 - output) if output.ndim == 1 else output.gather(1, index[:, None])[:, 0]
    return -right.clamp_min(SMALLEST).log().mean(dtype=torch.float64)
