"""How do lists of unequal length become a column that shards can hold?"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingest.column_types import RaggedType
from penstock.errors import DataError

__all__ = ["missing_in_lists", "ragged_lists"]


def ragged_lists(
    name: str, array: pa.Array, *, batch: Literal["padded", "packed"], pad_value: float, max_length: int | None
) -> pa.Array:
    """Turn a column of lists of numbers into `RaggedType`, cut to `max_length` entries. Null rows and entries stay.

    Args:
        name: of the column, for the error.
        batch, pad_value: see `RaggedType`.

    Raises:
        DataError: the column holds no lists of numbers.
    """
    plain = array.storage if isinstance(array.type, pa.BaseExtensionType) else array
    kind = plain.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    entry = kind.value_type if lists else kind
    if not lists or not (pa.types.is_integer(entry) or pa.types.is_floating(entry) or pa.types.is_boolean(entry)):
        raise DataError(
            f"preprocess: ragged cannot take column {name!r} of type {kind}: it takes lists of numbers",
            next_step="make such lists in a map_batches function before it, or take the column out of the step",
        )
    if max_length is not None:
        plain = pc.list_slice(plain, 0, max_length, return_fixed_size_list=False)
    if pa.types.is_boolean(entry):
        entry = pa.uint8()
    ragged = RaggedType(entry, batch, pad_value)
    lengths = pc.fill_null(pc.list_value_length(plain), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    values = plain.flatten().cast(entry)
    stored = pa.LargeListArray.from_arrays(pa.array(offsets), values, type=ragged.storage_type, mask=plain.is_null())
    return pa.ExtensionArray.from_storage(ragged, stored)


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
