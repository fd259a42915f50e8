"""Is one model better than another on the same rows? A metric of each, and how much of their difference is chance.

The interval is a paired bootstrap's: rows are drawn with both models' answers, so that the difficulty of a row cancels out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

__all__ = ["Paired", "compare_paired"]

_MOST_DRAWS, _FEWEST_DRAWS = 500, 100
_ROWS_DRAWN = 20_000_000
"""Over all draws, so that a million rows take no longer than a minute."""


class Paired(NamedTuple):
    """Two models on the same rows."""

    rows: int
    before: float
    after: float
    low: float
    """Lower end of the 95 % interval of `after - before`, over the draws whose rows define the metric; not a number where these
    are less than half, or there are too few rows to draw from."""
    high: float

    @property
    def difference(self) -> float:
        """How much higher the later model's metric is."""
        return self.after - self.before


def compare_paired(before: Callable[..., float], after: Callable[..., float], rows: int) -> Paired:
    """Compare two models' metrics over `rows` rows.

    Args:
        before, after: a metric over the rows at the given indices, or over all; see `Scorer` of training/registry.
    """
    draws = int(np.clip(_ROWS_DRAWN // max(1, rows), _FEWEST_DRAWS, _MOST_DRAWS)) if rows > 1 else 0
    generator = np.random.default_rng(0)  # for repeatable results
    differences = []
    for _ in range(draws):
        drawn = generator.integers(rows, size=rows)
        differences.append(after(drawn) - before(drawn))
    defined = [each for each in differences if not math.isnan(each)]
    enough = defined and 2 * len(defined) >= draws
    low, high = np.percentile(defined, (2.5, 97.5)) if enough else (float("nan"), float("nan"))
    return Paired(rows, before(), after(), float(low), float(high))
