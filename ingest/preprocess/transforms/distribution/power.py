"""How do skewed numbers come near a normal distribution? By a power, the likeliest one of the train split.

Found and applied as scikit-learn's PowerTransformer does; a test compares the two.
Source: Yeo, Johnson, "A new family of power transformations to improve normality or symmetry", Biometrika 87 (2000).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy import special, stats
from sklearn.preprocessing import PowerTransformer

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.preprocess.learnt import ColumnFacts, ColumnState, Question
from penstock.ingest.preprocess.transforms.distribution.numbers import EachNumber
from penstock.ingest.preprocess.transforms.transform import ColumnNames
from penstock.messages import in_yaml

__all__ = ["Power", "PowerOptions"]


class PowerOptions(Section):
    """Numeric columns that become float32, near a normal distribution of mean 0 and deviation 1 over the train split."""

    columns: ColumnNames
    """Names, or `*` for every numeric column but the label. While it learns, the driver holds 8 bytes for each value of the
    train split in these columns, and about 90 more for each of the column it is at (270 with `box_cox`)."""
    method: Literal["yeo_johnson", "box_cox"] = "yeo_johnson"
    """`yeo_johnson` takes any number; `box_cox` only those above 0, and a row with another one cannot be used."""


class Power(EachNumber[PowerOptions]):
    """Numbers raised to the power that makes them most normal."""

    Options = PowerOptions
    libraries = ("scikit-learn", "scipy")

    def question(self, column: str) -> Question:
        return Question(column, "numbers", values=True)

    def learn(self, column: str, facts: ColumnFacts) -> ColumnState:
        values = np.array(facts.values)
        if self.options.method == "box_cox" and facts.low <= 0:
            raise DataError(
                f"preprocess: {self.name}: column {column!r} holds {facts.low:g} in the train split, and box_cox takes numbers "
                "above 0",
                next_step=f"use method: yeo_johnson, or leave {column} out of the transform",
            )
        if facts.low == facts.high:
            return ColumnState(column=column, center=facts.low, scale=1.0, more={"lambda": 1.0, "constant": True})
        method = self.options.method.replace("_", "-")
        found = PowerTransformer(method=method, standardize=False).fit(values[:, None]).lambdas_[0]
        powered = self._powered(values, float(found))
        center, scale = float(powered.mean()), float(powered.std())
        if not (np.isfinite(center) and np.isfinite(scale) and scale > 0):
            raise DataError(
                f"preprocess: {self.name}: the numbers of column {column!r} (from {facts.low:g} to {facts.high:g}) have no "
                "power that makes them normal",
                next_step=f"use quantile: {{columns: [{in_yaml(column)}]}}, or leave it out of the transform",
            )
        return ColumnState(column=column, center=center, scale=scale, more={"lambda": float(found)})

    def apply_to(self, values: np.ndarray, state: ColumnState) -> np.ndarray:
        """See `EachNumber`."""
        more = state.more or {}
        powered = values if more.get("constant") else self._powered(values, float(more["lambda"]))
        return np.asarray((powered - (state.center or 0.0)) / (state.scale or 1.0))

    def _powered(self, values: np.ndarray, power: float) -> np.ndarray:
        if self.options.method == "yeo_johnson":
            return np.asarray(stats.yeojohnson(values, power)) if len(values) else values
        return np.where(values > 0, special.boxcox(np.where(values > 0, values, 1.0), power), np.nan)
