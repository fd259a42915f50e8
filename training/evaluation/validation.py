"""Measure the model on a held-out split while it trains. Every row counts once, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from penstock.ingest.columns.arrays import numpy_arrays
from penstock.ingest.feed.batch import Batch
from penstock.ingest.feed.cursor import Feed
from penstock.training.evaluation.metrics import MetricSet
from penstock.training.model import TrainedModel
from penstock.training.own_values import OwnValues, collecting, logged_rows
from penstock.training.ranks import Group
from penstock.training.recipe import Recipe, RecipeModel
from penstock.training.rng import keeping_rng
from penstock.training.step.learner import Learner

__all__ = ["measured", "run_over", "validate"]

BatchObserver = Callable[[Batch, Tensor], None]
"""Called per batch with (batch, predictions)."""


def validate(learner: Learner, recipe: Recipe, feed: Feed, metrics: MetricSet, group: Group) -> dict[str, float]:
    """Measure loss and metrics over the feed's split, without an effect on training. A collective.

    Returns:
        `val/loss`, `val/<metric>` and values that user code logged meanwhile, the same on every rank.
    """
    learner.sync_buffers()
    learner.model.eval()
    try:
        with keeping_rng(group.device), learner.callbacks.showing(learner.model), learner.autocast():
            learner.sync_buffers()  # a callback's averages of them differ between ranks, too; rank 0's are saved
            return measured(RecipeModel(recipe, learner.callee, group.device), feed, metrics, group)
    finally:
        learner.train_mode()


def measured(model: TrainedModel, feed: Feed, metrics: MetricSet, group: Group) -> dict[str, float]:
    """Measure `val/loss`, `val/<metric>` and values of user code over all ranks' rows, in eval mode. A collective."""
    with collecting(OwnValues(group, "val")) as own:
        loss, rows = run_over(model, feed.batches(0), metrics)
    logged = own.totals()
    total, count = group.sum([loss, float(rows)])
    values = {"loss": total / max(count, 1.0), **metrics.compute()}
    return {**logged, **{f"val/{name}": value for name, value in values.items()}}


@torch.no_grad()
def run_over(
    model: TrainedModel, batches: Iterable[Batch], metrics: MetricSet, observe: BatchObserver | None = None
) -> tuple[float, int]:
    """Run the model over batches of a split, updating `metrics`. The model is in eval mode already.

    Returns:
        (sum of the rows' losses, rows).
    """
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    rows = 0
    for batch in batches:
        if batch.rows == 0:
            continue
        columns: dict[str, Any] = {**batch.columns, **numpy_arrays(batch.arrow)}
        logged_rows(batch.rows)
        total += model.loss(columns).double() * batch.rows
        logged_rows(1)  # a value that `predict` logs counts once a call
        rows += batch.rows
        if model.can_predict and (metrics.metrics or observe):
            output = model.predict(columns, batch.rows)
            metrics.update(output, columns)
            if observe:
                observe(batch, output)
    return float(total), rows
