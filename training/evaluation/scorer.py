"""One model's metric over any choice of rows, from its answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.ingest.schema import FeedSchema
from penstock.training.evaluation.metrics import make_metrics
from penstock.training.model import Predicts

__all__ = ["Scorer"]


class _Probabilities(Predicts):
    """Logarithms of probabilities: their softmax is the probabilities."""


class Scorer:
    """One model's metric over any choice of rows, by the code that measures it in the evaluate stage.

    Args:
        metric: a name from training/evaluation/metrics.py.
        schema: names the label and its classes.
        output: float32, [rows, classes] probabilities or [rows] values.
        target: [rows], the class or the value.

    Raises:
        SpecError: the metric is unknown or does not fit the label.
    """

    def __init__(self, metric: str, schema: FeedSchema, output: NDArray[Any], target: NDArray[Any]) -> None:
        self._metric, self._label = metric, str(schema.label)
        self._measured = make_metrics([metric], schema, _Probabilities(), "register.promote.metric")
        scores = np.log(np.maximum(output, 1e-12)) if schema.num_classes is not None else output
        self._output = torch.from_numpy(np.ascontiguousarray(scores, np.float32))
        self._target = torch.from_numpy(np.ascontiguousarray(target))

    def __call__(self, rows: NDArray[np.int64] | None = None) -> float:
        """Compute the metric over `rows`, or all; NaN if it is undefined (see `undefined`)."""
        index: Any = slice(None) if rows is None else torch.from_numpy(rows)
        self._measured.update(self._output[index], {self._label: self._target[index]})
        return self._measured.compute()[self._metric]

    @property
    def undefined(self) -> str | None:
        """Why the last value is not a number, if the rows leave it undefined."""
        return self._measured.undefined.get(self._metric)
