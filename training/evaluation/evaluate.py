"""How good is a finished model on held-out rows? Metrics, figures and tables of one checkpoint.

Rows are streamed; memory holds five numbers of each, and the state of the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import DataError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import METRICS_OF, FeedSchema, Split
from penstock.plugins import optional
from penstock.progress import Progress, silent
from penstock.training.evaluation.metrics import MetricSet, label_kind, make_metrics, prepare_predictions, prepare_target
from penstock.training.evaluation.validation import run_over
from penstock.training.job import TrainJob
from penstock.training.model import ClassScores, TrainedModel
from penstock.training.open_feeds import open_job_feed
from penstock.training.own_values import OwnValues, collecting

__all__ = ["Answers", "EvaluationResult", "Slice", "answers_of", "evaluate"]

MAX_ROWS = 1_000_000
"""Rows of a split whose answers are recorded: the first ones in stored order, 20 bytes each."""

Answers = dict[str, NDArray[Any]]
"""A model's answers on rows: `id` is a row's number in its split; `predicted` the class of the highest score, or the value;
`target`; `loss` is -log of the true class's probability, or the distance from the true value; `confidence` the probability
of the predicted class, if the label is one. Empty if the label is not one class or one number, or without rows."""


def answers_of(
    ids: NDArray[np.int64], columns: Mapping[str, Tensor], output: Tensor, schema: FeedSchema, predicts: ClassScores
) -> Answers:
    """Judge a batch of predictions row by row."""
    kind = label_kind(schema)
    if kind == "none" or (schema.label is not None and schema[schema.label].shape):
        return {}
    prediction = prepare_predictions(output, schema, predicts).float().cpu().numpy()
    target = prepare_target(columns[str(schema.label)], schema).cpu().numpy()
    if kind == "regression":
        found = {"predicted": prediction, "target": target, "loss": np.abs(prediction - target)}
    else:
        loss = -np.log(np.maximum(prediction[np.arange(len(target)), target.astype(np.int64)], 1e-12))
        found = {"predicted": prediction.argmax(axis=1), "target": target, "loss": loss, "confidence": prediction.max(axis=1)}
    return {"id": ids, **{name: np.asarray(values, np.float32) for name, values in found.items()}}


def _in_order(batches: Iterable[Answers]) -> Answers:
    """Put the answers of batches together, ordered by row number."""
    given = [answers for answers in batches if answers]
    if not given:
        return {}
    order = np.argsort(np.concatenate([answers["id"] for answers in given]), kind="stable")
    return {name: np.concatenate([answers[name] for answers in given])[order] for name in given[0]}


class Slice(NamedTuple):
    """Some rows of a split. Picklable."""

    column: str
    name: str
    """Readable: `country=France`, `18<=age<30`."""
    rows: np.ndarray
    """bool [rows of the split], by the row's number."""


@dataclass(frozen=True)
class EvaluationResult:
    """Results of an evaluation. Picklable.

    Attributes:
        metrics: `test/<metric>` and `val/<metric>` to value; the loss is always there.
        figures: file name (`test-confusion_matrix.png`) to PNG.
        tables: file name without suffix to columns, such as the importance of the source's columns.
        rows: split to the model's answer on each of its rows (see `Answers`), without the confidence.
        undefined: a metric that the rows leave undefined (`test/auroc` of rows of one class) to the reason. Its value is NaN.
        slices: `split`, `column`, `slice`, `rows` and the metrics of each slice, without the loss. A metric that its rows leave
            undefined is None, and `not_defined` (else None) names them with the reasons.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    figures: dict[str, bytes] = field(default_factory=dict)
    tables: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    rows: dict[Split, dict[str, np.ndarray]] = field(default_factory=dict)
    slices: list[dict[str, Any]] = field(default_factory=list)
    undefined: dict[str, str] = field(default_factory=dict)


def evaluate(
    job: TrainJob,
    model: TrainedModel,
    *,
    splits: Sequence[Split] = ("test",),
    metrics: Iterable[str] | None = None,
    slices: Mapping[Split, Sequence[Slice]] = MappingProxyType({}),
    progress: Progress = silent,
) -> EvaluationResult:
    """Measure a model on held-out splits, in this process.

    Args:
        job: the training: its dataset and batch size.
        model: with weights, as of `penstock.training.model.load_model`.
        splits: which splits, of those that have rows.
        metrics: names from training/evaluation/metrics.py; None takes the model's own, else those that fit the label.
        slices: which rows of a split are measured by themselves, too.
        progress: takes the rows done.

    Raises:
        SpecError: a metric is unknown or does not fit.
        TrainingError: the user's code fails.
        DataError: a shard is damaged, or a split has no rows.
    """
    schema, rows_of = job.manifest.feed_schema, job.manifest.rows
    names = None if metrics is None else list(metrics)
    make_metrics(names, schema, model)  # refuses a typo before a pass over the rows
    result = EvaluationResult()
    has_loss = getattr(model, "has_loss", True)
    if not has_loss and not model.can_predict:
        return result
    total = sum(rows_of.get(split, 0) for split in splits)
    judged: dict[Split, Answers] = {}
    done = 0

    def observe(rows: int) -> None:
        nonlocal done
        done += rows
        progress(done, total, "rows")

    for split in splits:
        if not rows_of.get(split):
            raise DataError(f"split {split!r} has no rows to evaluate", next_step=f"set data.{split}")
        measured, parts, answers, (loss, count), logged = _measure_split(
            job, model, split, names, slices.get(split, ()), observe
        )
        result.rows[split] = {name: values[:MAX_ROWS] for name, values in answers.items() if name != "confidence"}
        for part, metrics_of_part in parts:
            entry = {"split": split, "column": part.column, "slice": part.name, "rows": int(part.rows.sum())}
            of_part, undefined = metrics_of_part.compute(), metrics_of_part.undefined
            shown = {name: None if name in undefined else value for name, value in of_part.items()}
            why = "; ".join(f"{name}: {reason}" for name, reason in undefined.items()) or None
            result.slices.append({**entry, **shown, "not_defined": why})
        values = {"loss": loss / count} if has_loss else {}
        values |= measured.compute()
        phase = METRICS_OF[split]
        result.undefined.update({f"{phase}/{name}": reason for name, reason in measured.undefined.items()})
        result.metrics.update(logged | {f"{phase}/{name}": value for name, value in values.items()})
        judged[split] = answers
    if (export := optional("penstock.training.exporters.figures:export")) is not None:
        drawn, tables = export(schema, judged, model.importance())
        return replace(result, figures=drawn, tables=tables)
    return result


def _measure_split(
    job: TrainJob,
    model: TrainedModel,
    split: Split,
    names: Sequence[str] | None,
    slices: Sequence[Slice],
    observe: Callable[[int], None],
) -> tuple[MetricSet, list[tuple[Slice, MetricSet]], Answers, tuple[float, int], dict[str, float]]:
    """Run the model over a split.

    Returns:
        Metrics of the split and of each slice, the answers, (sum of the rows' losses, rows), and values that user code logged.
    """
    schema, collected = job.manifest.feed_schema, list[Answers]()
    whole, *parts = (make_metrics(names, schema, model).to(model.device) for _ in range(1 + len(slices)))
    measured = list(zip(slices, parts, strict=True))

    def seen(batch: Batch, output: Tensor) -> None:
        collected.append(answers_of(batch.row_ids, batch.columns, output, schema, model.predicts))
        for part, metrics in measured:
            _measure_slice(part, metrics, batch, output)
        observe(len(output))

    feed = open_job_feed(job, split, 0, 1, model.device)
    with collecting(OwnValues(None, METRICS_OF[split])) as logged:
        loss = run_over(model, feed.batches(0), whole, seen)
    return whole, measured, _in_order(collected), loss, logged.totals()


def _measure_slice(part: Slice, metrics: MetricSet, batch: Batch, output: Tensor) -> None:
    chosen = torch.from_numpy(np.flatnonzero(part.rows[batch.row_ids])).to(output.device)
    if len(chosen):
        columns = {name: values[chosen] for name, values in batch.columns.items() if len(values) == len(output)}
        metrics.update(output[chosen], columns)
