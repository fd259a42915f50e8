"""How do lists of unequal length become a column that shards can hold?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DataError
from penstock.ingest.columns.extension_types import RaggedType
from penstock.ingest.columns.type_text import parse_type

if TYPE_CHECKING:
    from penstock.ingest.preprocess.steps import RaggedOptions


__all__ = ["ragged_lists"]


def ragged_lists(name: str, array: pa.Array, options: RaggedOptions) -> pa.Array:
    """Turn column `name`, lists of numbers, into `RaggedType`. Null rows and entries stay.

    Raises:
        DataError: the column holds no lists of numbers, or such that `dtype` or `pad_value` do not fit.
    """
    plain = array.storage if isinstance(array.type, pa.BaseExtensionType) else array
    kind = plain.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    entry = kind.value_type if lists else kind
    deep = isinstance(array.type, pa.FixedShapeTensorType) and len(array.type.shape) > 1
    if deep or not lists or not (pa.types.is_integer(entry) or pa.types.is_floating(entry) or pa.types.is_boolean(entry)):
        raise DataError(
            f"preprocess: ragged cannot take column {name!r} of type {kind}: it takes lists of numbers",
            next_step="make such lists in a map_batches function before it, or take the column out of the step",
        )
    if options.max_length is not None:
        plain = pc.list_slice(plain, 0, options.max_length, return_fixed_size_list=False)
    entry = parse_type(options.dtype) if options.dtype else pa.uint8() if pa.types.is_boolean(entry) else entry
    ragged = RaggedType(entry, options.batch, options.pad_value)
    try:
        pa.scalar(options.pad_value).cast(entry)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"preprocess: ragged: pad_value {options.pad_value:g} is no value for column {name!r} of {entry}",
            next_step="choose one that fits, or another `dtype`",
        ) from error
    lengths = pc.fill_null(pc.list_value_length(plain), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    try:
        values = plain.flatten().cast(entry)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"preprocess: ragged: an entry of column {name!r} does not fit dtype {entry}: {error}",
            next_step="choose a wider dtype (ragged: {dtype: int64}), or correct the entry at its source",
        ) from error
    stored = pa.LargeListArray.from_arrays(pa.array(offsets), values, type=ragged.storage_type, mask=plain.is_null())
    return pa.ExtensionArray.from_storage(ragged, stored)
