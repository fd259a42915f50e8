"""Which rows of a list column hold something missing?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    pass


__all__ = ["missing_in_lists"]


def missing_in_lists(lists: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Two masks [rows] of a list array: rows that are null or hold a null, and other rows that hold NaN or an infinity."""
    null = lists.is_null().to_numpy(zero_copy_only=False)
    entries = lists.flatten()  # without those of null rows
    row_of = np.repeat(np.flatnonzero(~null), pc.list_value_length(lists).drop_null().to_numpy())
    not_finite = np.zeros(len(lists), np.bool_)
    if entries.null_count:
        null[row_of[entries.is_null().to_numpy(zero_copy_only=False)]] = True
    if pa.types.is_floating(entries.type):
        not_finite[row_of[~np.isfinite(entries.to_numpy(zero_copy_only=False))]] = True
    return null, not_finite & ~null
