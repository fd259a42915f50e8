"""How did the model do on each held-out row? Kept in small columns, so that two models are compared on the same rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.ingest.schema import FeedSchema
from penstock.training.evaluation.metrics import label_kind, prepare_predictions, prepare_target
from penstock.training.model import ClassScores

__all__ = ["MAX_ROWS", "RowResults"]

MAX_ROWS = 1_000_000
"""Of a larger split the first so many rows, in stored order, are kept: 20 bytes each."""


@dataclass
class RowResults:
    """One model's answers on one split, in the order they were made.

    Attributes:
        ids: number of each row in its split.
        predicted: the class of the highest score, or the value.
        target: the class, or the value.
        loss: -log of the true class's probability, or the distance from the true value.
    """

    ids: list[NDArray[np.int64]] = field(default_factory=list)
    predicted: list[NDArray[np.float32]] = field(default_factory=list)
    target: list[NDArray[np.float32]] = field(default_factory=list)
    loss: list[NDArray[np.float32]] = field(default_factory=list)

    def add(
        self, ids: NDArray[np.int64], columns: dict[str, Tensor], output: Tensor, schema: FeedSchema, predicts: ClassScores
    ) -> None:
        """Take in a batch of predictions; of a label that is neither one class nor one quantity nothing is kept."""
        kind = label_kind(schema)
        kept = ids < MAX_ROWS
        several = schema.label is not None and schema[schema.label].shape
        if kind == "none" or several or not kept.any():
            return
        prediction = prepare_predictions(output, schema, predicts).float().cpu().numpy()
        target = prepare_target(columns[str(schema.label)], schema).cpu().numpy()
        if kind == "regression":
            predicted, loss = prediction, np.abs(prediction - target)
        else:
            of_truth = prediction[np.arange(len(target)), target.astype(np.int64)]
            predicted, loss = prediction.argmax(axis=1), -np.log(np.maximum(of_truth, 1e-12))
        self.ids.append(ids[kept])
        for values, into in ((predicted, self.predicted), (target, self.target), (loss, self.loss)):
            into.append(np.asarray(values, np.float32)[kept])

    def columns(self) -> dict[str, NDArray[np.int64] | NDArray[np.float32]]:
        """`id`, `predicted`, `target` and `loss`, in the order of the rows' numbers; empty if nothing was kept."""
        if not self.ids:
            return {}
        ids = np.concatenate(self.ids)
        order = np.argsort(ids, kind="stable")
        named = {"predicted": self.predicted, "target": self.target, "loss": self.loss}
        return {"id": ids[order], **{name: np.concatenate(values)[order] for name, values in named.items()}}
