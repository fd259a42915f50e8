"""How good is a finished model on held-out rows? Metrics, figures and tables of one checkpoint, counted in one process.

Rows are streamed; kept in memory are only a class-by-class count, the bins of a calibration curve, and per row one number and
its label where a curve needs them (two classes, or a regression).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.errors import DataError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import METRICS_OF, FeedSchema, Split
from penstock.progress import Progress, silent
from penstock.training.evaluation.blocks import BlocksOf, shared_out
from penstock.training.evaluation.metrics import MetricSet, label_kind, make_metrics, prepare_predictions, prepare_target
from penstock.training.evaluation.row_results import RowResults
from penstock.training.evaluation.validation import run_over
from penstock.training.job import TrainJob
from penstock.training.model import ClassScores, TrainedModel
from penstock.training.open_feeds import open_job_feed
from penstock.training.own_values import OwnValues, collecting

__all__ = ["EvaluationResult", "FigureData", "Slice", "evaluate"]


CALIBRATION_BINS = 15

MAX_MATRIX_CLASSES = 200
"""With more classes a confusion matrix is neither readable nor small."""


class Slice(NamedTuple):
    """Some rows of a split. Picklable."""

    column: str
    name: str
    """As a person writes it: `country=France`, `18<=age<30`."""
    rows: np.ndarray
    """bool [rows of the split], by the row's number; some are in it."""


Parts = list[tuple[Slice, MetricSet]]


@dataclass(frozen=True)
class EvaluationResult:
    """What was found. Picklable.

    Attributes:
        metrics: `test/<metric>` and `val/<metric>` to value; the loss is always there.
        figures: file name (`test-confusion_matrix.png`) to PNG.
        tables: file name without suffix to columns, such as precision and recall per class.
        rows: split to the model's answer on each of its rows (see `RowResults.columns`).
        undefined: a metric that the rows leave undefined (`test/auroc` of rows of one class) to the reason. It is no number.
        slices: `split`, `column`, `slice`, `rows` and the metrics of each slice, without the loss. A metric that its rows leave
            undefined is None, and `not_defined` (else None) says which ones are and why.
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
    figures: bool = True,
    slices: Mapping[Split, Sequence[Slice]] = MappingProxyType({}),
    blocks: BlocksOf | None = None,
    progress: Progress = silent,
) -> EvaluationResult:
    """Measure a model on held-out splits, in this process.

    Args:
        job: the training: its dataset and batch size.
        model: what to measure, such as `penstock.training.model.load_model` makes of a checkpoint.
        splits: which splits, of those that have rows.
        metrics: names from training/evaluation/metrics.py; None takes the model's own, else those that fit the label.
        figures: draw figures.
        slices: which rows of a split are measured by themselves, too.
        blocks: batches that other processes have answered to; what is found is the same to the bit.
        progress: told rows done.

    Raises:
        SpecError: a metric is unknown or does not fit.
        TrainingError: the user's code fails.
        DataError: a shard is damaged, or a split has no rows.
    """
    schema, rows_of = job.manifest.feed_schema, job.manifest.rows
    names = None if metrics is None else list(metrics)
    make_metrics(names, schema, model)  # before any work: a typo should not cost a pass over the rows
    result = EvaluationResult()
    has_loss = getattr(model, "has_loss", True)
    if not has_loss and not model.can_predict:
        return result
    total = sum(rows_of.get(split, 0) for split in splits)
    done = 0
    for split in splits:
        if not rows_of.get(split):
            raise DataError(f"split {split!r} has no rows to evaluate", next_step=f"set data.{split}")
        feed = open_job_feed(job, split, 0, 1, model.device)
        measured = make_metrics(names, schema, model).to(model.device)
        figure_data = FigureData(schema, model.predicts)

        rows = RowResults()
        parts = [(part, make_metrics(names, schema, model).to(model.device)) for part in slices.get(split, ())]

        def observe(
            batch: Batch, output: Tensor, figure_data: FigureData = figure_data, rows: RowResults = rows, parts: Parts = parts
        ) -> None:
            nonlocal done
            done += len(output)
            if figures:
                figure_data.add(batch.columns, output)
            rows.add(batch.row_ids, batch.columns, output, schema, model.predicts)
            for part, metrics_of_part in parts:
                _measure_part(part, metrics_of_part, batch, output)
            progress(done, total, "rows")

        with collecting(OwnValues(None, METRICS_OF[split])) as own:
            answering = model if blocks is None else shared_out(model, split, blocks)
            loss, count = run_over(answering, feed, measured, observe)
        result.rows[split] = rows.columns()
        for part, metrics_of_part in parts:
            entry = {"split": split, "column": part.column, "slice": part.name, "rows": int(part.rows.sum())}
            of_part, undefined = metrics_of_part.compute(), metrics_of_part.undefined
            shown = {name: None if name in undefined else value for name, value in of_part.items()}
            why = "; ".join(f"{name}: {reason}" for name, reason in undefined.items()) or None
            result.slices.append({**entry, **shown, "not_defined": why})
        values = {"loss": loss / count} if has_loss else {}
        values |= measured.compute()
        result.undefined.update({f"{METRICS_OF[split]}/{name}": reason for name, reason in measured.undefined.items()})
        result.metrics.update({**own.totals(), **{f"{METRICS_OF[split]}/{name}": value for name, value in values.items()}})
        if figures and model.can_predict:
            result.figures.update({f"{split}-{name}.png": image for name, image in figure_data.figures(split).items()})
            result.tables.update({f"{split}-{name}": table for name, table in figure_data.tables().items()})
    if importance := model.importance():
        result.tables["feature_importance"] = {"column": list(importance), "share": list(importance.values())}
        if figures:
            from penstock.training.evaluation import figures as draw  # as in FigureData.figures

            result.figures["feature_importance.png"] = draw.figure_png(draw.importance_figure(importance))
    return result


def _measure_part(part: Slice, metrics: MetricSet, batch: Batch, output: Tensor) -> None:
    chosen = torch.from_numpy(np.flatnonzero(part.rows[batch.row_ids])).to(output.device)
    if len(chosen):
        columns = {name: values[chosen] for name, values in batch.columns.items() if len(values) == len(output)}
        metrics.update(output[chosen], columns)


class FigureData:
    """What figures and tables are drawn from, collected batch by batch."""

    def __init__(self, schema: FeedSchema, predicts: ClassScores = "logits") -> None:
        self._schema, self._predicts = schema, predicts
        self._kind = label_kind(schema)
        classes = schema.num_classes or 0
        self._names = list(schema.classes or [str(index) for index in range(classes)])
        self._confusion = np.zeros((classes, classes) if classes <= MAX_MATRIX_CLASSES else (0, 0), dtype=np.int64)
        self._bins = np.zeros((3, CALIBRATION_BINS))
        """Per bin of confidence: rows, sum of confidence, rows predicted rightly."""
        self._scores: list[np.ndarray] = []
        self._targets: list[np.ndarray] = []

    def add(self, columns: dict[str, Tensor], output: Tensor) -> None:
        """Count in a batch of predictions."""
        if self._kind in ("none", "multilabel"):
            return
        prediction = prepare_predictions(output, self._schema, self._predicts).cpu().numpy()
        target = prepare_target(columns[str(self._schema.label)], self._schema).cpu().numpy()
        if self._kind == "regression":
            self._keep(prediction.reshape(-1), target.reshape(-1))
            return
        finite = np.isfinite(prediction).all(axis=1)  # as in `_kept`
        prediction, target = prediction[finite], target[finite]
        chosen = prediction.argmax(axis=1)
        confidence = prediction.max(axis=1)
        np.add.at(self._confusion, (target, chosen), 1) if self._confusion.size else None
        index = np.minimum((confidence * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
        for row, values in enumerate((np.ones_like(confidence), confidence, (chosen == target).astype(np.float64))):
            np.add.at(self._bins[row], index, values)
        if self._schema.num_classes == 2:
            self._keep(prediction[:, 1], target)

    def figures(self, split: str) -> dict[str, bytes]:
        """PNG by name."""
        if self._kind in ("none", "multilabel"):
            return {}
        # Here, because matplotlib and scikit-learn would cost every command a second and a half.
        from penstock.training.evaluation import figures as draw

        scores, targets = self._kept()
        label = str(self._schema.label)
        if self._kind == "regression" and not len(scores):
            return {}
        if self._kind == "regression":
            drawn = {
                "predicted_true": draw.predicted_true_figure(scores, targets, label, f"Predicted and true: {split}"),
                "errors": draw.residuals_figure(scores, targets, label, f"Errors: {split}"),
            }
            return {name: draw.figure_png(figure) for name, figure in drawn.items()}
        counts, confidence, right = self._bins
        curve = draw.calibration_figure(counts.astype(np.int64), confidence, right.astype(np.int64), f"Calibration: {split}")
        drawn = {"calibration": curve}
        if self._confusion.size:
            drawn["confusion_matrix"] = draw.confusion_figure(self._confusion, self._names, f"Confusion matrix: {split}")
        positive, hits = self._names[-1], targets.astype(np.int64)
        if self._schema.num_classes == 2 and 0 < hits.sum() < len(hits):  # of one class alone there is no curve
            drawn["roc"] = draw.roc_figure(scores, hits, positive, f"ROC curve: {split}")
            drawn["precision_recall"] = draw.precision_recall_figure(scores, hits, positive, f"Precision and recall: {split}")
        return {name: draw.figure_png(figure) for name, figure in drawn.items()}

    def tables(self) -> dict[str, dict[str, list[Any]]]:
        """Columns by table name."""
        if not self._confusion.size:
            return {}
        right = np.diag(self._confusion).astype(np.float64)
        true, predicted = self._confusion.sum(axis=1), self._confusion.sum(axis=0)
        precision = right / np.maximum(predicted, 1)
        recall = right / np.maximum(true, 1)
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
        columns = {"class": self._names, "rows": true.tolist(), "predicted": predicted.tolist()}
        scores = {"precision": precision, "recall": recall, "f1": f1}
        return {"classes": columns | {name: [round(float(v), 6) for v in values] for name, values in scores.items()}}

    def _keep(self, scores: np.ndarray, targets: np.ndarray) -> None:
        self._scores.append(scores.astype(np.float64))
        self._targets.append(targets.astype(np.float64))

    def _kept(self) -> tuple[np.ndarray, np.ndarray]:
        if not self._scores:
            return np.empty(0), np.empty(0)
        scores, targets = np.concatenate(self._scores), np.concatenate(self._targets)
        finite = np.isfinite(scores)  # of weights that went astray; the metrics tell, and the figures show the rest
        return scores[finite], targets[finite]
