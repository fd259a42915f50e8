"""How good is a finished model on held-out rows? Metrics, figures and tables of one checkpoint.

Rows are streamed; memory holds five numbers of each, and the state of the metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock.errors import DataError
from penstock.ingest.schema import METRICS_OF, Split
from penstock.progress import Progress, silent
from penstock.training.evaluation.metrics import make_metrics
from penstock.training.evaluation.split_measures import (
    MAX_ROWS,
    Slice,
    SplitMeasures,
    StartHelpers,
    measure_batches,
)
from penstock.training.job import TrainJob
from penstock.training.model import TrainedModel

__all__ = ["EvaluationResult", "evaluate"]


@dataclass(frozen=True)
class EvaluationResult:
    """Results of an evaluation. Picklable.

    Attributes:
        metrics: `test/<metric>` and `val/<metric>` to value; the loss is always there.
        figures: file name (`test-confusion_matrix.png`) to PNG.
        tables: file name without suffix to columns, such as precision and recall per class.
        rows: split to the model's answer on each of its rows (see `RowResults.columns`).
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
    figures: bool = True,
    slices: Mapping[Split, Sequence[Slice]] = MappingProxyType({}),
    helpers: StartHelpers | None = None,
    progress: Progress = silent,
) -> EvaluationResult:
    """Measure a model on held-out splits, in this process.

    Args:
        job: the training: its dataset and batch size.
        model: with weights, as of `penstock.training.model.load_model`.
        splits: which splits, of those that have rows.
        metrics: names from training/evaluation/metrics.py; None takes the model's own, else those that fit the label.
        figures: draw figures.
        slices: which rows of a split are measured by themselves, too.
        helpers: starts other processes for some of the batches; the last bits of the values may differ then.
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
    done = 0

    def observe(rows: int) -> None:
        nonlocal done
        done += rows
        progress(done, total, "rows")

    for split in splits:
        if not rows_of.get(split):
            raise DataError(f"split {split!r} has no rows to evaluate", next_step=f"set data.{split}")
        measures = SplitMeasures(job, model, split, names, slices.get(split, ()))
        task = partial(measure_batches, job, split, names, slices.get(split, ()))
        batches = -(-rows_of[split] // job.spec.batch_rows)
        # user metrics may not be mergeable
        started = [] if helpers is None or measures.metrics.raw else helpers(task, batches)
        measures.measure(0, started[0].first if started else None, observe)
        for helper in started:
            counts = helper.result()
            if counts is None:
                measures.measure(helper.first, helper.last, observe)
            else:
                measures.merge(counts)
                observe(counts.rows_counted)
        answers = measures.rows.columns()
        result.rows[split] = {name: values[:MAX_ROWS] for name, values in answers.items() if name != "confidence"}
        for part, metrics_of_part in measures.slices:
            entry = {"split": split, "column": part.column, "slice": part.name, "rows": int(part.rows.sum())}
            of_part, undefined = metrics_of_part.compute(), metrics_of_part.undefined
            shown = {name: None if name in undefined else value for name, value in of_part.items()}
            why = "; ".join(f"{name}: {reason}" for name, reason in undefined.items()) or None
            result.slices.append({**entry, **shown, "not_defined": why})
        values = {"loss": measures.loss / measures.count} if has_loss else {}
        values |= measures.metrics.compute()
        phase = METRICS_OF[split]
        result.undefined.update({f"{phase}/{name}": reason for name, reason in measures.metrics.undefined.items()})
        result.metrics.update(measures.logged.totals() | {f"{phase}/{name}": value for name, value in values.items()})
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
