"""How is one function of each number applied to columns that may have nulls? What the transforms of this room share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import pyarrow as pa

from penstock.errors import DataError
from penstock.ingest.columns.fixed_shape import is_number
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.transform import Functions, Transform
from penstock.ingest.spec import DataSpec

__all__ = ["EachNumber"]


O = TypeVar("O")  # noqa: E741 - the options


class EachNumber(Transform[O]):
    """A learnt function of one number a row. A null stays null, and NaN and infinities stay for the last check to find."""

    learns = True

    @abstractmethod
    def apply_to(self, values: np.ndarray, state: ColumnState) -> np.ndarray:
        """float64 [values] to float64 [values]; NaN for a number that it does not take."""

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
            made = self._made(wide.to_numpy(zero_copy_only=False), state)
            rows.put(state.column, pa.array(made, mask=missing))

    def _made(self, values: np.ndarray, state: ColumnState) -> np.ndarray:
        """float32; what is not finite stays as it is."""
        finite = np.isfinite(values)
        made = values.astype(np.float64)
        made[finite] = self.apply_to(values[finite], state)
        return made.astype(np.float32)
