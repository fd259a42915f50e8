"""Is a metric defined for the labels of the rows? Also loads torchmetrics.

torchmetrics gives 0 for an undefined metric, such as the area under the curve of rows of one class, as if a perfect model had
failed. Here such a value is NaN, and a mean over classes leaves out the undefined ones.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["Needs", "defined_classes", "label_counts", "metric_library", "r2_score"]


Needs = Literal["a row", "both"]
"""Rows that define a metric of a class: one of the class, or also one of another class."""


def metric_library() -> Any:
    """Import torchmetrics, a second or two with the scipy that it loads, at the first metric."""
    import torchmetrics.classification

    return torchmetrics


def label_counts(classes: int) -> Metric:
    """Make a counter of the rows of each class, or each of several labels: its value is [classes + 1], rows last."""
    made: Metric = _kinds()[0](classes)
    return made


def defined_classes(counts: Tensor, needs: Needs) -> Tensor:
    """Return for each class whether a metric of it is defined, bool [classes]; `counts` as of `label_counts`."""
    of_class, rows = counts[:-1], counts[-1]
    return (of_class > 0) & (of_class < rows) if needs == "both" else of_class > 0


def r2_score(outputs: int) -> Metric:
    """Make the coefficient of determination of scikit-learn: float64, NaN for a constant label.

    That of torchmetrics compares sums of squares with 1e-4, so small numbers give 0 or 1.
    """
    made: Metric = _kinds()[1](outputs)
    return made


@cache
def _kinds() -> tuple[Any, Any]:
    base: Any = metric_library().Metric

    class LabelCounts(base):  # type: ignore[misc]
        full_state_update = False
        counts: Tensor

        def __init__(self, classes: int) -> None:
            super().__init__()
            self.add_state("counts", torch.zeros(classes + 1, dtype=torch.int64), dist_reduce_fx="sum")

        def update(self, target: Tensor) -> None:
            found = target.long().sum(0) if target.ndim > 1 else torch.bincount(target, minlength=len(self.counts) - 1)
            self.counts += torch.cat([found, found.new_tensor([len(target)])])

        def compute(self) -> Tensor:
            return self.counts

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

    return LabelCounts, R2


def _pooled(parts: Tensor) -> Tensor:
    """Add up moments of several sets of rows, [sets, 4, outputs]. Sums of squares alone cancel where the mean is far from 0."""
    rows, means, spreads, errors = parts.unbind(1)
    total = rows.sum(0)
    mean = (rows * means).sum(0) / total.clamp(min=1)
    spread = (spreads + rows * (means - mean).square()).sum(0)
    return torch.stack([total, mean, spread, errors.sum(0)])
