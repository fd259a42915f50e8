"""Is a metric defined for the labels of the rows? Also loads torchmetrics.

torchmetrics gives 0 for an undefined metric, such as the area under the curve of rows of one class, as if a perfect model had
failed. Here such a value is NaN, and a mean over classes leaves out the undefined ones.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["Needs", "defined_classes", "metric_library", "r2_metric"]

Needs = Literal["a row", "both"]
"""Rows that define a metric of a class: one of the class, or also one of another class."""


def metric_library() -> Any:
    """Import torchmetrics, a second or two with the scipy that it loads, at the first metric."""
    import torchmetrics.classification

    return torchmetrics


def defined_classes(counts: Tensor, needs: Needs) -> Tensor:
    """Return for each class whether a metric of it is defined, bool [classes]; `counts` are its rows, and last all rows."""
    of_class, rows = counts[:-1], counts[-1]
    return (of_class > 0) & (of_class < rows) if needs == "both" else of_class > 0


@cache
def r2_metric() -> Any:
    """Make the class of scikit-learn's coefficient of determination: float64, NaN for a constant label.

    That of torchmetrics compares sums of squares with 1e-4, so small numbers give 0 or 1.
    """
    base: Any = metric_library().Metric

    class R2(base):  # type: ignore[misc]
        full_state_update = False
        moments: Tensor
        """[4, outputs]: rows, mean, sum of squared distances from the mean, sum of squared errors."""

        def __init__(self, outputs: int) -> None:
            super().__init__()
            self.add_state("moments", torch.zeros(4, outputs, dtype=torch.float64), dist_reduce_fx=_pooled)

        def update(self, preds: Tensor, target: Tensor) -> None:
            preds, target = (each.double().reshape(-1, self.moments.shape[1]) for each in (preds, target))
            if len(target):
                mean = target.mean(0)
                rows = torch.full_like(mean, len(target))
                batch = torch.stack([rows, mean, (target - mean).square().sum(0), (target - preds).square().sum(0)])
                self.moments = _pooled(torch.stack([self.moments, batch]))

        def compute(self) -> Tensor:
            rows, mean, spread, errors = self.moments
            varies = spread > rows * (1e-14 * mean).square()  # rounding leaves a little of a constant label
            return torch.where(varies, 1 - errors / spread, float("nan")).nanmean()

    return R2


def _pooled(parts: Tensor) -> Tensor:
    """Add up moments of several sets of rows, [sets, 4, outputs]. Sums of squares alone cancel where the mean is far from 0."""
    rows, means, spreads, errors = parts.unbind(1)
    total = rows.sum(0)
    mean = (rows * means).sum(0) / total.clamp(min=1)
    spread = (spreads + rows * (means - mean).square()).sum(0)
    return torch.stack([total, mean, spread, errors.sum(0)])
