"""Is one model better than another on the same rows? A metric of each, and how much their difference owes to chance.

The interval is a paired bootstrap's: rows are drawn again and again with both models' answers to them, so that what makes a row
hard for both cancels out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.ingest.schema import FeedSchema
from penstock.training.evaluation.metrics import make_metrics
from penstock.training.model import Predicts

__all__ = ["LOWER_IS_BETTER", "Paired", "Scorer", "compare_paired"]


LOWER_IS_BETTER = frozenset({"loss", "mae", "mse", "rmse", "calibration_error"})

_MOST_DRAWS, _FEWEST_DRAWS = 500, 100
_ROWS_DRAWN = 20_000_000
"""Over all draws, so that a million rows take no longer than a minute."""


class Paired(NamedTuple):
    """Two models on the same rows."""

    rows: int
    before: float
    after: float
    low: float
    """Lower end of the 95 % interval of `after - before`; not a number where there are too few rows to draw from."""
    high: float

    @property
    def difference(self) -> float:
        """How much higher the later model's metric is."""
        return self.after - self.before


class _Probabilities(Predicts):
    """Answers a metric takes as they are: logarithms of probabilities, whose softmax they are again."""


class Scorer:
    """One model's metric over any choice of rows, by the code that measures it in the evaluate stage.

    Args:
        metric: a name from training/evaluation/metrics.py.
        schema: says which column is the label, and of how many classes.
        output: float32, [rows, classes] probabilities or [rows] values.
        target: [rows], the class or the value.

    Raises:
        SpecError: the metric is unknown or does not fit the label.
    """

    def __init__(self, metric: str, schema: FeedSchema, output: NDArray[Any], target: NDArray[Any]) -> None:
        self._metric, self._label = metric, str(schema.label)
        self._measured = make_metrics([metric], schema, _Probabilities())
        scores = np.log(np.maximum(output, 1e-12)) if schema.num_classes is not None else output
        self._output = torch.from_numpy(np.ascontiguousarray(scores, np.float32))
        self._target = torch.from_numpy(np.ascontiguousarray(target))

    def __call__(self, rows: NDArray[np.int64] | None = None) -> float:
        """The metric over `rows`, or over all of them."""
        index: Any = slice(None) if rows is None else torch.from_numpy(rows)
        self._measured.update(self._output[index], {self._label: self._target[index]})
        return self._measured.compute()[self._metric]


def compare_paired(before: Callable[..., float], after: Callable[..., float], rows: int, seed: int = 0) -> Paired:
    """Compare two models' metrics over `rows` rows.

    Args:
        before, after: a metric over the rows at the given indices, or over all; see `Scorer`.
        seed: of the draws, so that the same question gets the same answer.
    """
    draws = int(np.clip(_ROWS_DRAWN // max(1, rows), _FEWEST_DRAWS, _MOST_DRAWS)) if rows > 1 else 0
    generator = np.random.default_rng(seed)
    apart = []
    for _ in range(draws):
        drawn = generator.integers(rows, size=rows)
        apart.append(after(drawn) - before(drawn))
    low, high = np.nanpercentile(apart, (2.5, 97.5)) if draws else (float("nan"), float("nan"))
    return Paired(rows, before(), after(), float(low), float(high))
