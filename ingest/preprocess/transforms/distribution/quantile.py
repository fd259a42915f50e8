"""How do numbers of any distribution come to an even or a normal one? By their place among the quantiles of the train split.

As scikit-learn's QuantileTransformer does without its drawing of a part of the rows; a test compares the two.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from scipy import special

from penstock.config import Section
from penstock.ingest.preprocess.learnt import ColumnFacts, ColumnState, Question
from penstock.ingest.preprocess.transforms.distribution.numbers import EachNumber
from penstock.ingest.preprocess.transforms.transform import ColumnNames

__all__ = ["Quantile", "QuantileOptions"]


_NEAR = 1e-7
"""A normal distribution has no ends: the extremes of the train split, and what lies beyond, are this far from 0 and 1."""


class QuantileOptions(Section):
    """Numeric columns that become float32 by their rank in the train split: outliers weigh as much as any other row."""

    columns: ColumnNames
    """Names, or `*` for every numeric column but the label. While it learns, the driver holds 8 bytes for each value of the
    train split in these columns, and 16 more for each of the column whose quantiles it takes."""
    quantiles: Annotated[int, Field(ge=2, le=100_000)] = 1000
    """How many are kept; between them is a straight line."""
    output: Literal["uniform", "normal"] = "uniform"
    """`uniform`: from 0 to 1. `normal`: as if drawn from a normal distribution of mean 0 and deviation 1, within 5.2."""


class Quantile(EachNumber[QuantileOptions]):
    """Numbers to their place among those of the train split."""

    Options = QuantileOptions
    libraries = ("scipy",)

    def question(self, column: str) -> Question:
        return Question(column, "numbers", quantiles=tuple(np.linspace(0.0, 1.0, self.options.quantiles).tolist()))

    def learn(self, column: str, facts: ColumnFacts) -> ColumnState:
        # Neighbours may fall by the last bit where they are interpolated.
        return ColumnState(column=column, knots=tuple(np.maximum.accumulate(facts.quantiles).tolist()))

    def apply_to(self, values: np.ndarray, state: ColumnState) -> np.ndarray:
        """See `EachNumber`."""
        knots, levels = np.array(state.knots), np.linspace(0.0, 1.0, len(state.knots or ()))
        # Once from each side, so that a value that many rows have comes to the middle of its ranks.
        places = 0.5 * (np.interp(values, knots, levels) - np.interp(-values, -knots[::-1], -levels[::-1]))
        places = np.where(values <= knots[0], 0.0, np.where(values >= knots[-1], 1.0, places))
        if self.options.output == "uniform":
            return places
        return np.asarray(special.ndtri(np.clip(places, _NEAR, 1.0 - _NEAR)))
