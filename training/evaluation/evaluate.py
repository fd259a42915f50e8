"""How good is a finished model on held-out rows? Metrics, figures and tables of one checkpoint, counted in one process.

Rows are streamed; memory holds five numbers of each, beside what its metrics keep.
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
from penstock.ingest.schema import METRICS_OF, Split
from penstock.progress import Progress, silent
from penstock.training.evaluation.blocks import BlocksOf, shared_out
from penstock.training.evaluation.metrics import MetricSet, make_metrics
from penstock.training.evaluation.row_results import MAX_ROWS, RowResults
from penstock.training.evaluation.validation import run_over
from penstock.training.job import TrainJob
from penstock.training.model import TrainedModel
from penstock.training.open_feeds import open_job_feed
from penstock.training.own_values import OwnValues, collecting

__all__ = ["EvaluationResult", "Slice", "evaluate"]


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
        rows = RowResults()
        parts = [(part, make_metrics(names, schema, model).to(model.device)) for part in slices.get(split, ())]

        def observe(batch: Batch, output: Tensor, rows: RowResults = rows, parts: Parts = parts) -> None:
            nonlocal done
            done += len(output)
            rows.add(batch.row_ids, batch.columns, output, schema, model.predicts)
            for part, metrics_of_part in parts:
                _measure_part(part, metrics_of_part, batch, output)
            progress(done, total, "rows")

        with collecting(OwnValues(None, METRICS_OF[split])) as own:
            answering = model if blocks is None else shared_out(model, split, blocks)
            loss, count = run_over(answering, feed, measured, observe)
        answers = rows.columns()
        result.rows[split] = {name: values[:MAX_ROWS] for name, values in answers.items() if name != "confidence"}
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
        if figures:
            from penstock.training.evaluation import figures as draw  # matplotlib and scikit-learn take a second and a half

            for name, figure in draw.draw_figures(schema, answers, split).items():
                result.figures[f"{split}-{name}.png"] = draw.figure_png(figure)
            if table := draw.class_table(schema, answers):
                result.tables[f"{split}-classes"] = table
    if importance := model.importance():
        result.tables["feature_importance"] = {"column": list(importance), "share": list(importance.values())}
        if figures:
            from penstock.training.evaluation import figures as draw

            result.figures["feature_importance.png"] = draw.figure_png(draw.importance_figure(importance))
    return result


def _measure_part(part: Slice, metrics: MetricSet, batch: Batch, output: Tensor) -> None:
    chosen = torch.from_numpy(np.flatnonzero(part.rows[batch.row_ids])).to(output.device)
    if len(chosen):
        columns = {name: values[chosen] for name, values in batch.columns.items() if len(values) == len(output)}
        metrics.update(output[chosen], columns)
