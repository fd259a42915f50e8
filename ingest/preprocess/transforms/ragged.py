"""How do lists of unequal length become a column that shards can hold?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, PositiveInt

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.casts import is_list
from penstock.ingest.columns.extension_types import RaggedType
from penstock.ingest.columns.type_text import parse_type
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.transform import Functions, Names, Transform
from penstock.ingest.spec import DataSpec

__all__ = ["Ragged", "RaggedOptions"]


class RaggedOptions(Section):
    """Lists of numbers, of a length of its own in each row. Lists of boxes, of as many numbers each, are joined to one."""

    columns: Names
    """Names."""
    batch: Literal["padded", "packed"] = "padded"
    """Form of a batch. `padded`: `x` [rows, longest of the batch] and `x_length`, int64 [rows]. `packed`: `x`, the entries
    of all rows joined, and `x_offsets`, int64 [rows + 1]: row i is `x[x_offsets[i]:x_offsets[i + 1]]`."""
    dtype: Literal["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"] | None = None
    """Type of the entries, instead of the source's. An entry that does not fit is an error."""
    pad_value: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Value after the last entry of a row in a padded batch."""
    max_length: PositiveInt | None = None
    """Cut longer lists to this many entries."""


class Ragged(Transform[RaggedOptions]):
    """Lists of unequal length, such as tokens: batches hold them padded or packed."""

    Options = RaggedOptions
    makes_lists = True

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        self.require(rows, self.options.columns)
        for name in self.options.columns:
            rows.put(name, _ragged_lists(name, rows.column(name), self.options))
            rows.reject_missing(name)


def _joined(array: pa.Array) -> pa.Array:
    """Join the entries of each row if they are lists of one length."""
    if not (is_list(array.type) and pa.types.is_fixed_size_list(array.type.value_type)):
        return array
    width, lengths = array.type.value_type.list_size, pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64) * width])
    return pa.LargeListArray.from_arrays(pa.array(offsets), array.flatten().flatten(), mask=array.is_null())


def _ragged_lists(name: str, array: pa.Array, options: RaggedOptions) -> pa.Array:
    """Turn column `name`, lists of numbers, into `RaggedType`. Null rows and entries stay.

    Raises:
        DataError: the column does not hold lists of numbers, or `dtype` or `pad_value` does not fit them.
    """
    plain = _joined(array.storage if isinstance(array.type, pa.BaseExtensionType) else array)
    kind = plain.type
    entry = kind.value_type if is_list(kind) else kind
    deep = isinstance(array.type, pa.FixedShapeTensorType) and len(array.type.shape) > 1
    if (
        deep
        or not is_list(kind)
        or not (pa.types.is_integer(entry) or pa.types.is_floating(entry) or pa.types.is_boolean(entry))
    ):
        raise DataError(
            f"preprocess: ragged cannot take column {name!r} of type {kind}: it takes lists of numbers",
            next_step="make such lists in a map_batches function before it, or take the column out of the transform",
        )
    if options.max_length is not None:
        plain = pc.list_slice(plain, 0, options.max_length, return_fixed_size_list=False)
    entry = parse_type(options.dtype) if options.dtype else pa.uint8() if pa.types.is_boolean(entry) else entry
    ragged = RaggedType(entry, options.batch, options.pad_value)
    try:
        pa.scalar(options.pad_value).cast(entry)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"preprocess: ragged: pad_value {options.pad_value:g} is not a value for column {name!r} of {entry}",
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
