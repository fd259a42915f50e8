"""What is measured on one split: loss, metrics of all rows and of slices, the answer on each row, what user code logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import METRICS_OF, FeedSchema, Split
from penstock.training.evaluation.metrics import MetricSet, label_kind, make_metrics, prepare_predictions, prepare_target
from penstock.training.evaluation.validation import run_over
from penstock.training.job import TrainJob
from penstock.training.model import ClassScores, TrainedModel
from penstock.training.open_feeds import open_job_feed
from penstock.training.own_values import OwnValues, collecting

__all__ = ["MAX_ROWS", "RowResults", "Slice", "SplitMeasures"]


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
        """Add a batch of predictions, if the label is one class or one number."""
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

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return `id` and the other attributes that have values, ordered by row number; empty without rows."""
        if not self.ids:
            return {}
        ids = np.concatenate(self.ids)
        order = np.argsort(ids, kind="stable")
        named = {name: getattr(self, name) for name in ("predicted", "target", "loss", "confidence")}
        return {"id": ids[order], **{name: np.concatenate(values)[order] for name, values in named.items() if values}}


class Slice(NamedTuple):
    """Some rows of a split. Picklable."""

    column: str
    name: str
    """Readable: `country=France`, `18<=age<30`."""
    rows: np.ndarray
    """bool [rows of the split], by the row's number."""


class SplitMeasures:
    """The measures of one split in one process.

    Args:
        metrics: names; None takes the model's own, else those that fit the label.
        slices: rows that are measured by themselves, too.
    """

    def __init__(
        self, job: TrainJob, model: TrainedModel, split: Split, metrics: Sequence[str] | None, slices: Sequence[Slice]
    ) -> None:
        self._model, self._schema = model, job.manifest.feed_schema
        self._feed = open_job_feed(job, split, 0, 1, model.device)
        self.metrics = make_metrics(metrics, self._schema, model).to(model.device)
        self.slices = [(part, make_metrics(metrics, self._schema, model).to(model.device)) for part in slices]
        self.rows = RowResults()
        self.logged = OwnValues(None, METRICS_OF[split])
        self.loss, self.count = 0.0, 0

    def measure(self, observe: Callable[[int], None]) -> None:
        """Count all batches; `observe` takes the rows of each."""

        def seen(batch: Batch, output: Tensor) -> None:
            self.rows.add(batch.row_ids, batch.columns, output, self._schema, self._model.predicts)
            for part, metrics in self.slices:
                _measure_slice(part, metrics, batch, output)
            observe(len(output))

        with collecting(self.logged):
            self.loss, self.count = run_over(self._model, self._feed.batches(0), self.metrics, seen)


def _measure_slice(part: Slice, metrics: MetricSet, batch: Batch, output: Tensor) -> None:
    chosen = torch.from_numpy(np.flatnonzero(part.rows[batch.row_ids])).to(output.device)
    if len(chosen):
        columns = {name: values[chosen] for name, values in batch.columns.items() if len(values) == len(output)}
        metrics.update(output[chosen], columns)
