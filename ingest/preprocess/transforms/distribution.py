"""How do numbers of a skewed distribution come to an even or a normal one? scikit-learn's transformers, kept as plain numbers.

What they learn is a `ColumnState`; the transformer is made again from it where rows are prepared, without a fit.
Source: Yeo, Johnson, "A new family of power transformations to improve normality or symmetry", Biometrika 87 (2000).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

import numpy as np
import pyarrow as pa
from pydantic import Field
from sklearn.preprocessing import PowerTransformer, QuantileTransformer

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.fixed_shape import is_number
from penstock.ingest.preprocess.learnt import ColumnFacts, ColumnState, Question
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.transform import ColumnNames, Functions, Transform
from penstock.ingest.spec import DataSpec
from penstock.messages import in_yaml

__all__ = ["Power", "PowerOptions", "Quantile", "QuantileOptions"]


O = TypeVar("O")  # noqa: E741 - the options


class _EachNumber(Transform[O]):
    """A learnt function of one number a row. A null stays null, and NaN and infinities stay for the last check to find."""

    learns = True
    libraries = ("scikit-learn",)

    @abstractmethod
    def _apply_to(self, values: np.ndarray, state: ColumnState) -> np.ndarray:
        """Transform finite float64 [values, 1], at least one, to float64 [values, 1]; NaN where it takes none."""

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        self.require(rows, [state.column for state in fitted])
        for state in fitted:
            values = rows.column(state.column)
            if not is_number(values.type):
                raise DataError(
                    f"preprocess: {self.name} was fitted on numbers, and column {state.column!r} is {values.type} here"
                )
            wide = values.cast(pa.float64(), safe=False)
            missing = wide.is_null().to_numpy(zero_copy_only=False) if wide.null_count else None
            made = np.array(wide.to_numpy(zero_copy_only=False))
            finite = np.isfinite(made)
            if finite.any():
                made[finite] = self._apply_to(made[finite][:, None], state)[:, 0]
            rows.put(state.column, pa.array(made.astype(np.float32), mask=missing))


class PowerOptions(Section):
    """Numeric columns that become float32, near a normal distribution of mean 0 and deviation 1 over the train split."""

    columns: ColumnNames
    """Names, or `*` for every numeric column but the label. Learning takes 8 bytes in the driver for each value of these
    columns in the train split, and 90 more for each of the current column (270 with `box_cox`)."""
    method: Literal["yeo_johnson", "box_cox"] = "yeo_johnson"
    """`yeo_johnson` takes any number; `box_cox` takes numbers above 0, and rejects rows with others."""


class Power(_EachNumber[PowerOptions]):
    """Numbers raised to the power that makes them most normal."""

    Options = PowerOptions

    def question(self, column: str) -> Question:
        return Question(column, "numbers", values=True)

    def learn(self, column: str, facts: ColumnFacts) -> ColumnState:
        values = np.array(facts.values)[:, None]
        if self.options.method == "box_cox" and facts.low <= 0:
            raise DataError(
                f"preprocess: {self.name}: column {column!r} holds {facts.low:g} in the train split, and box_cox takes numbers "
                "above 0",
                next_step=f"use method: yeo_johnson, or leave {column} out of the transform",
            )
        if facts.low == facts.high:
            return ColumnState(column=column, center=facts.low, scale=1.0, more={"lambda": 1.0, "constant": True})
        fitted = self._transformer().fit(values)
        powered = fitted.transform(values)
        center, scale = float(powered.mean()), float(powered.std())
        if not (np.isfinite(center) and np.isfinite(scale) and scale > 0):
            raise DataError(
                f"preprocess: {self.name}: the numbers of column {column!r} (from {facts.low:g} to {facts.high:g}) have no "
                "power that makes them normal",
                next_step=f"use quantile: {{columns: [{in_yaml(column)}]}}, or leave it out of the transform",
            )
        return ColumnState(column=column, center=center, scale=scale, more={"lambda": float(fitted.lambdas_[0])})

    def _apply_to(self, values: np.ndarray, state: ColumnState) -> np.ndarray:
        more, powered = state.more or {}, values
        if not more.get("constant"):
            transformer = self._transformer()
            transformer.lambdas_, transformer.n_features_in_ = np.array([more["lambda"]]), 1
            taken = values if self.options.method == "yeo_johnson" else np.where(values > 0, values, np.nan)
            powered = transformer.transform(taken)
        return np.asarray((powered - (state.center or 0.0)) / (state.scale or 1.0))

    def _transformer(self) -> PowerTransformer:
        return PowerTransformer(method=self.options.method.replace("_", "-"), standardize=False)


class QuantileOptions(Section):
    """Numeric columns that become float32 by their rank in the train split: outliers weigh as much as any other row."""

    columns: ColumnNames
    """Names, or `*` for every numeric column but the label. Learning takes 8 bytes in the driver for each value of these
    columns in the train split, and 16 more for each of the current column."""
    quantiles: Annotated[int, Field(ge=2, le=100_000)] = 1000
    """Number of quantiles that are kept; values between two are interpolated linearly."""
    output: Literal["uniform", "normal"] = "uniform"
    """`uniform`: from 0 to 1. `normal`: a normal distribution of mean 0 and deviation 1, cut off at 5.2."""


class Quantile(_EachNumber[QuantileOptions]):
    """Numbers to their place among those of the train split."""

    Options = QuantileOptions

    def question(self, column: str) -> Question:
        return Question(column, "numbers", quantiles=tuple(np.linspace(0.0, 1.0, self.options.quantiles).tolist()))

    def learn(self, column: str, facts: ColumnFacts) -> ColumnState:
        # Neighbours may fall by the last bit where they are interpolated.
        return ColumnState(column=column, knots=tuple(np.maximum.accumulate(facts.quantiles).tolist()))

    def _apply_to(self, values: np.ndarray, state: ColumnState) -> np.ndarray:
        knots = np.array(state.knots)[:, None]
        transformer = QuantileTransformer(n_quantiles=len(knots), output_distribution=self.options.output, subsample=None)
        transformer.quantiles_, transformer.references_ = knots, np.linspace(0.0, 1.0, len(knots))
        transformer.n_quantiles_, transformer.n_features_in_ = len(knots), 1
        return np.asarray(transformer.transform(values))
