"""How do numbers come to a common scale? Four ways to learn a center and a scale, one way to apply them.

The formulas are those of ray.data.preprocessors; a test compares the two. Ray's own are not used because they go through
pandas, where an integer column with a null turns into floats.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.fixed_shape import is_number
from penstock.ingest.preprocess.learnt import ColumnFacts, ColumnState, Question
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.transform import ColumnNames, Functions, Transform
from penstock.ingest.spec import DataSpec

__all__ = ["MaxAbsScaler", "MinMaxScaler", "RobustScaler", "ScalerOptions", "StandardScaler"]

_NOISE = 8 * float(np.finfo(np.float64).eps)
"""A spread of up to this share of the values themselves is rounding, which must not be blown up. ray.data has 1e-8 whatever
the values are, which takes nanoseconds for constants."""


class ScalerOptions(Section):
    """Numeric columns that become float32 on a common scale."""

    columns: ColumnNames
    """Names, or `*` for every column of one number a row but the label."""


class _Scaler(Transform[ScalerOptions]):
    Options = ScalerOptions
    learns = True

    def question(self, column: str) -> Question:
        return Question(column, "numbers")

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        self.require(rows, [state.column for state in fitted])
        for state in fitted:
            values = rows.column(state.column)
            if not is_number(values.type):
                raise DataError(
                    f"preprocess: {self.name} was fitted on numbers, and column {state.column!r} is {values.type} here"
                )
            wide = values.cast(pa.float64(), safe=False) if values.null_count else values
            missing = wide.is_null().to_numpy(zero_copy_only=False) if wide.null_count else None
            with np.errstate(over="ignore"):  # the last check finds an infinity
                scaled = np.subtract(wide.to_numpy(zero_copy_only=False), np.float64(state.center or 0.0), dtype=np.float64)
                scaled /= state.scale
                made = scaled.astype(np.float32)
            rows.put(state.column, pa.array(made, mask=missing))


class StandardScaler(_Scaler):
    """(x - mean) / standard deviation, both of the train split."""

    def learn(self, column: str, facts: ColumnFacts) -> ColumnState:
        return _scaling(column, facts.mean, facts.std, facts.low, facts.high)


class MinMaxScaler(_Scaler):
    """(x - min) / (max - min): the train split fills 0 to 1."""

    def learn(self, column: str, facts: ColumnFacts) -> ColumnState:
        return _scaling(column, facts.low, facts.high - facts.low, facts.low, facts.high)


class MaxAbsScaler(_Scaler):
    """x / max(abs(x))."""

    def learn(self, column: str, facts: ColumnFacts) -> ColumnState:
        return ColumnState(column=column, center=0.0, scale=max(abs(facts.low), abs(facts.high)) or 1.0)


class RobustScaler(_Scaler):
    """(x - median) / (upper - lower quartile), which outliers do not move. To learn them, the driver holds all values of train.

    They take 8 bytes each, and those of the current column 16 more.
    """

    def question(self, column: str) -> Question:
        return Question(column, "numbers", quantiles=(0.25, 0.5, 0.75))

    def learn(self, column: str, facts: ColumnFacts) -> ColumnState:
        low, median, high = facts.quantiles
        return _scaling(column, median, high - low, low, high)


def _scaling(column: str, center: float, scale: float, low: float, high: float) -> ColumnState:
    """Make the state; a column from `low` to `high` that is constant but for rounding gets the scale 1, and becomes zeros."""
    if high - low <= _NOISE * max(abs(low), abs(high)):
        return ColumnState(column=column, center=low, scale=1.0)
    return ColumnState(column=column, center=center, scale=scale)
