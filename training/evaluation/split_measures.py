"""Measure one split, or some batches of it in each of several processes, whose states are merged.

Merged sums have another order, and so perhaps other last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import METRICS_OF, FeedSchema, Split
from penstock.training.evaluation.metrics import MetricSet, State, label_kind, make_metrics, prepare_predictions, prepare_target
from penstock.training.evaluation.validation import run_over
from penstock.training.job import TrainJob
from penstock.training.model import ClassScores, TrainedModel
from penstock.training.open_feeds import open_job_feed
from penstock.training.own_values import OwnValues, collecting

__all__ = ["MAX_ROWS", "Helper", "MeasuredBatches", "RowResults", "Slice", "SplitMeasures", "StartHelpers", "measure_batches"]


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

    def extend(self, other: RowResults) -> None:
        """Add the answers of another process."""
        for name in ("ids", "predicted", "target", "loss", "confidence"):
            getattr(self, name).extend(getattr(other, name))

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


class MeasuredBatches(NamedTuple):
    """The counts of some batches. Picklable, on the CPU."""

    loss: float
    rows_counted: int
    metrics: State
    slices: list[State]
    rows: RowResults
    logged: dict[str, Any]


class Helper(NamedTuple):
    """Another process that counts the batches from `first` to before `last`."""

    first: int
    last: int
    result: Callable[[], MeasuredBatches | None]
    """Waits for the counts; None if the process failed."""


StartHelpers = Callable[[Callable[[TrainedModel, int, int], MeasuredBatches], int], list[Helper]]
"""Starts processes that count the last of a number of batches with the given function."""


class SplitMeasures:
    """The measures of one split in one process.

    Args:
        metrics: names; None takes the model's own, else those that fit the label.
        slices: rows that are measured by themselves, too.
    """

    def __init__(
        self, job: TrainJob, model: TrainedModel, split: Split, metrics: Sequence[str] | None, slices: Sequence[Slice]
    ) -> None:
        self._job, self._model, self._schema = job, model, job.manifest.feed_schema
        self._feed = open_job_feed(job, split, 0, 1, model.device)
        self.metrics = make_metrics(metrics, self._schema, model).to(model.device)
        self.slices = [(part, make_metrics(metrics, self._schema, model).to(model.device)) for part in slices]
        self.rows = RowResults()
        self.logged = OwnValues(None, METRICS_OF[split])
        self.loss, self.count = 0.0, 0

    def measure(self, first: int = 0, last: int | None = None, observe: Callable[[int], None] | None = None) -> None:
        """Count the batches from `first` to before `last`, or to the end; `observe` takes the rows of each."""

        def seen(batch: Batch, output: Tensor) -> None:
            self.rows.add(batch.row_ids, batch.columns, output, self._schema, self._model.predicts)
            for part, metrics in self.slices:
                _measure_slice(part, metrics, batch, output)
            if observe is not None:
                observe(len(output))

        batches = self._feed.batches(0, first * self._job.spec.batch_rows)
        with collecting(self.logged):
            loss, count = run_over(self._model, islice(batches, None if last is None else last - first), self.metrics, seen)
        self.loss, self.count = self.loss + loss, self.count + count

    def counts(self) -> MeasuredBatches:
        """Return the counts so far, for `merge` in another process."""
        slices = [metrics.state() for _, metrics in self.slices]
        return MeasuredBatches(self.loss, self.count, self.metrics.state(), slices, self.rows, self.logged.sums())

    def merge(self, other: MeasuredBatches) -> None:
        """Add the counts of another process."""
        self.loss, self.count = self.loss + other.loss, self.count + other.rows_counted
        self.metrics.merge(other.metrics)
        for (_, metrics), state in zip(self.slices, other.slices, strict=True):
            metrics.merge(state)
        self.rows.extend(other.rows)
        self.logged.add_sums(other.logged)


def measure_batches(
    job: TrainJob,
    split: Split,
    metrics: Sequence[str] | None,
    slices: Sequence[Slice],
    model: TrainedModel,
    first: int,
    last: int,
) -> MeasuredBatches:
    """Count some batches of a split, in a helper."""
    measures = SplitMeasures(job, model, split, metrics, slices)
    measures.measure(first, last)
    return measures.counts()


def _measure_slice(part: Slice, metrics: MetricSet, batch: Batch, output: Tensor) -> None:
    chosen = torch.from_numpy(np.flatnonzero(part.rows[batch.row_ids])).to(output.device)
    if len(chosen):
        columns = {name: values[chosen] for name, values in batch.columns.items() if len(values) == len(output)}
        metrics.update(output[chosen], columns)
