"""What does a function of the user's see of an Arrow column?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.ingest.columns.fixed_shape import fixed_shape, is_number, missing_values, numbers

__all__ = ["as_numpy"]


def as_numpy(values: pa.Array) -> np.ndarray:
    """Numbers as arrays [rows, *shape]; numbers with nulls as floats with NaN; everything else as objects."""
    if isinstance(values.type, pa.FixedShapeTensorType) or pa.types.is_fixed_size_list(values.type):
        shaped = None if values.null_count else fixed_shape("", values, is_label=False)
        if isinstance(shaped, pa.Array) and not missing_values(shaped)[0].any():
            return _writable(numbers(shaped))
    if is_number(values.type) and not values.null_count:
        return _writable(values.to_numpy(zero_copy_only=False))
    if is_number(values.type):
        return _writable(values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
    if pa.types.is_timestamp(values.type) or pa.types.is_date(values.type):
        return _writable(values.to_numpy(zero_copy_only=False))
    objects = np.empty(len(values), object)
    for row, value in enumerate(_lists_of_numbers(values) or _plain_values(values)):
        objects[row] = value
    return objects


def _lists_of_numbers(values: pa.Array) -> list[np.ndarray | None] | None:
    """Return each row's list as an array of the entries' own dtype; None for other columns."""
    kind = values.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)) or not (
        pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)
    ):
        return None
    entries = values.flatten()  # without those of null rows
    if entries.null_count:
        return None
    flat = entries.to_numpy(zero_copy_only=False).copy()
    lengths = pc.list_value_length(values)
    ends = np.cumsum(pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False))
    starts = np.concatenate([np.zeros(1, ends.dtype), ends[:-1]])
    present = lengths.is_valid().to_numpy(zero_copy_only=False)
    return [flat[start:end] if there else None for start, end, there in zip(starts, ends, present, strict=True)]


def _plain_values(values: pa.Array) -> list[Any]:
    plain = values.to_pylist()
    return [np.asarray(value) if isinstance(value, list) else value for value in plain]


def _writable(values: np.ndarray) -> np.ndarray:
    return values if values.flags.writeable else values.copy()
