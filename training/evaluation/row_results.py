"""How did the model do on each held-out row? Small columns, for figures and to compare two models on the same rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.ingest.schema import FeedSchema
from penstock.training.evaluation.metrics import label_kind, prepare_predictions, prepare_target
from penstock.training.model import ClassScores

__all__ = ["MAX_ROWS", "RowResults"]

MAX_ROWS = 1_000_000
"""Rows of a split whose answers are recorded: the first ones in stored order, 20 bytes each."""


@dataclass
class RowResults:
    """One model's answers on one split, in the order they were made.

    Attributes:
        ids: number of each row in its split.
        predicted: the class of the highest score, or the value.
        target: the class, or the value.
        loss: -log of the true class's probability, or the distance from the true value.
        confidence: the probability of the predicted class; none of a value.
    """

    ids: list[NDArray[np.int64]] = field(default_factory=list)
    predicted: list[NDArray[np.float32]] = field(default_factory=list)
    target: list[NDArray[np.float32]] = field(default_factory=list)
    loss: list[NDArray[np.float32]] = field(default_factory=list)
    confidence: list[NDArray[np.float32]] = field(default_factory=list)

    def add(
        self, ids: NDArray[np.int64], columns: dict[str, Tensor], output: Tensor, schema: FeedSchema, predicts: ClassScores
    ) -> None:
        """Take in a batch of predictions; nothing is kept if the label is neither one class nor one number."""
        kind = label_kind(schema)
        several = schema.label is not None and schema[schema.label].shape
        if kind == "none" or several:
            return
        prediction = prepare_predictions(output, schema, predicts).float().cpu().numpy()
        target = prepare_target(columns[str(schema.label)], schema).cpu().numpy()
        if kind == "regression":
            predicted, loss = prediction, np.abs(prediction - target)
        else:
            of_truth = prediction[np.arange(len(target)), target.astype(np.int64)]
            predicted, loss = prediction.argmax(axis=1), -np.log(np.maximum(of_truth, 1e-12))
            self.confidence.append(prediction.max(axis=1))
        self.ids.append(ids)
        for values, into in ((predicted, self.predicted), (target, self.target), (loss, self.loss)):
            into.append(np.asarray(values, np.float32))

    def extend(self, other: RowResults) -> None:
        """Add the answers of another process."""
        for name in ("ids", "predicted", "target", "loss", "confidence"):
            getattr(self, name).extend(getattr(other, name))

    def columns(self) -> dict[str, NDArray[Any]]:
        """`id` and the other attributes that have values, in the order of the rows' numbers; empty if nothing was kept."""
        if not self.ids:
            return {}
        ids = np.concatenate(self.ids)
        order = np.argsort(ids, kind="stable")
        named = {name: getattr(self, name) for name in ("predicted", "target", "loss", "confidence")}
        return {"id": ids[order], **{name: np.concatenate(values)[order] for name, values in named.items() if values}}
