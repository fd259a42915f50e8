"""How does an Arrow column become numbers of one shape in every row, and which error names a column that cannot?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DataError
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.columns.casts import cast_array, is_list, is_text
from penstock.ingest.columns.extension_types import ImageType, RaggedType
from penstock.ingest.columns.images import holds_images
from penstock.ingest.columns.type_text import type_text, value_text
from penstock.messages import in_yaml

__all__ = [
    "UnequalLists",
    "cast_column",
    "fixed_shape",
    "is_number",
    "is_tensor",
    "is_text",
    "is_whole",
    "missing_values",
    "numbers",
    "single_chunk",
]


class UnequalLists(NamedTuple):
    """The first row whose list has another length than that of the first row."""

    row: int
    length: int
    expected: int


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of this type holds one number (or truth value) a row."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def is_tensor(kind: pa.DataType) -> bool:
    """Whether every row of a column of this type is numbers of one shape, or a list or image of `columns.extension_types`."""
    if pa.types.is_fixed_size_list(kind):
        return is_tensor(kind.value_type)
    if isinstance(kind, pa.FixedShapeTensorType | RaggedType | ImageType):
        return True
    return is_number(kind) and not pa.types.is_boolean(kind)


def single_chunk(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return the column as one array."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if isinstance(column.type, pa.FixedShapeTensorType):
        storage = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
        return pa.ExtensionArray.from_storage(column.type, single_chunk(storage))
    return column.combine_chunks()


def is_whole(array: pa.Array) -> bool:
    """Whether no row of the column is null or has a null, NaN or an infinity inside; quicker than `missing_values`."""
    flat = array.storage.flatten() if isinstance(array.type, pa.FixedShapeTensorType) else array
    if array.null_count or flat.null_count:
        return False
    if pa.types.is_floating(flat.type):
        return bool(np.isfinite(flat.to_numpy()).all())
    return not isinstance(array.type, RaggedType)


def missing_values(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Two masks [rows]: rows that are null or have a null inside, and other rows that have NaN or an infinity.

    Args:
        array: any type; entries of lists count only in fixed-shape tensors without null rows, and in `RaggedType`.
    """
    rows = len(array)
    if isinstance(array.type, ImageType):
        return array.is_null().to_numpy(zero_copy_only=False), np.zeros(rows, np.bool_)
    if isinstance(array.type, RaggedType):
        return _missing_in_lists(array.storage)
    flat = array.storage.flatten() if isinstance(array.type, pa.FixedShapeTensorType) else array
    null = _row_mask(pc.is_null(flat), rows) if flat.null_count else np.zeros(rows, np.bool_)
    if not pa.types.is_floating(flat.type):
        return null, np.zeros(rows, np.bool_)
    wide = flat.cast(pa.float32()) if flat.type == pa.float16() else flat  # Arrow has no is_finite for half floats
    return null, _row_mask(pc.fill_null(pc.invert(pc.is_finite(wide)), False), rows) & ~null


def _missing_in_lists(lists: pa.Array) -> tuple[np.ndarray, np.ndarray]:
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


def _row_mask(flags: pa.Array, rows: int) -> np.ndarray:
    values = flags.to_numpy(zero_copy_only=False).astype(np.bool_)
    return values if len(values) == rows else values.reshape(rows, -1).any(axis=1)


def numbers(array: pa.Array) -> np.ndarray:
    """Return a number or fixed-shape tensor column without nulls as an array [rows, *shape]; booleans as uint8."""
    if isinstance(array.type, pa.FixedShapeTensorType):
        return array.storage.flatten().to_numpy(zero_copy_only=False).reshape(len(array), *array.type.shape)
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values.astype(np.uint8) if values.dtype == np.bool_ else values


def fixed_shape(name: str, array: pa.Array, *, is_label: bool) -> pa.Array | UnequalLists:
    """Turn a column without null rows into a number or a fixed-shape tensor a row; lists of unequal length give `UnequalLists`.

    What `penstock.ingest.columns.extension_types` holds stays as it is.

    Raises:
        DataError: the type is not numeric; names the column and the transforms that would help.
    """
    kind = array.type
    if pa.types.is_boolean(kind):
        return array.cast(pa.uint8())
    if is_number(kind):
        return array
    if isinstance(kind, pa.FixedShapeTensorType):
        # A permuted tensor is stored in another order than it is read in.
        plain = pa.fixed_shape_tensor(kind.value_type, list(kind.shape))
        return array if kind == plain else tensor_array(array.to_numpy_ndarray())
    if isinstance(kind, RaggedType | ImageType):
        return array
    if pa.types.is_fixed_size_binary(kind):
        width = kind.byte_width
        data = np.frombuffer(array.buffers()[1], np.uint8)[array.offset * width :]
        return tensor_array(data[: len(array) * width].reshape(len(array), width))
    if is_list(kind):
        return _list_column(name, array, is_label=is_label)
    raise _no_numbers(name, array, is_label=is_label)


def _list_column(name: str, array: pa.Array, *, is_label: bool) -> pa.Array | UnequalLists:
    entry = array.type
    while is_list(entry):
        entry = entry.value_type
    if not is_number(entry):
        raise _no_numbers(name, array, is_label=is_label)
    shape: list[int] = []
    flat = array
    while is_list(flat.type):
        # An inner list that is null counts as one of no entries, which it has in what is flattened.
        lengths = pc.fill_null(pc.list_value_length(flat), 0).to_numpy(zero_copy_only=False)
        other = np.flatnonzero(lengths != lengths[:1])
        if len(other):
            row = int(other[0]) // int(np.prod(shape))
            return UnequalLists(row, int(lengths[other[0]]), int(lengths[0]))
        shape.append(int(lengths[0]) if len(lengths) else getattr(flat.type, "list_size", 1))
        flat = pc.list_flatten(flat)
    if 0 in shape:
        raise DataError(
            f"column {name!r}, of type {type_text(array.type)}, holds empty lists",
            next_step=f"leave it out (drop: [{in_yaml(name)}])",
        )
    if pa.types.is_boolean(flat.type):
        flat = flat.cast(pa.uint8())
    tensor = pa.fixed_shape_tensor(flat.type, shape)
    return pa.ExtensionArray.from_storage(tensor, pa.FixedSizeListArray.from_arrays(flat, int(np.prod(shape))))


def cast_column(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast without loss, except that floats may round, times by less than a second.

    Cast to a number, times become seconds since 1970, those of a day seconds since midnight, and durations seconds.

    Raises:
        pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError: a value does not fit, or there is no such conversion.
    """
    if is_number(kind) and (pa.types.is_date(array.type) or pa.types.is_timestamp(array.type)):
        zone = getattr(array.type, "tz", None)
        if pa.types.is_integer(kind):
            return array.cast(pa.timestamp("s", zone), safe=False).cast(pa.int64()).cast(kind)
        microseconds = _in_microseconds(array, pa.timestamp("us", zone))
        exact = pc.divide(microseconds.cast(pa.float64(), safe=False), 1e6)
        seconds = exact.cast(kind, safe=False)
        if pc.any(pc.greater_equal(pc.abs(pc.subtract(seconds.cast(pa.float64()), exact)), 1)).as_py():
            raise pa.ArrowInvalid(f"{kind} is off by a second or more")
        return seconds
    if is_number(kind) and (pa.types.is_duration(array.type) or pa.types.is_time(array.type)):
        whole = pa.duration("us") if pa.types.is_duration(array.type) else pa.time64("us")
        seconds = pc.divide(_in_microseconds(array, whole).cast(pa.float64(), safe=False), 1e6)
        return seconds.cast(kind, safe=pa.types.is_integer(kind))
    if pa.types.is_floating(kind) and (is_number(array.type) or pa.types.is_decimal(array.type)):
        return array.cast(kind, safe=False)
    if pa.types.is_floating(kind) and is_text(array.type):
        return pc.cast(pc.utf8_trim_whitespace(array), kind)
    return single_chunk(cast_array(array, kind))


def _in_microseconds(times: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast to microseconds: finer parts are cut off; a time beyond 64 bits is an error, as it would become another one."""
    return times.cast(options=pc.CastOptions(kind, allow_time_truncate=True)).cast(pa.int64())


def _no_numbers(name: str, array: pa.Array, *, is_label: bool) -> DataError:
    kind = array.type
    example = f", not {value_text(array, 0)}" if is_text(kind) and len(array) else ""
    column = in_yaml(name)
    if is_label and is_text(kind):
        return DataError(
            f"the label {name!r} is text; training needs class indices or numbers{example}",
            next_step=f"add the transform `- label_encoder: {{}}` for classes, or cast: {{{column}: float64}} for numbers",
        )
    if is_text(kind):
        numbers_as_text = f'if it holds numbers, cast: {{{column}: float64}}, data.csv: {{decimal: ","}}'
        advice = f"encode it (one_hot or ordinal: {{columns: [{column}]}}); {numbers_as_text}"
    elif pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        advice = f"cast: {{{column}: float64}} (times become seconds, of dates since 1970)"
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or holds_images(kind):
        advice = f"decode_image: {{column: {column}}} if it holds images"
    elif pa.types.is_struct(kind):
        advice = f"flatten: {{columns: [{column}]}} makes columns of its fields"
    else:
        advice = "make numbers of it"
    return DataError(
        f"column {name!r} has type {type_text(kind)}; after all transforms every column must hold numbers{example}",
        next_step=f"{advice}, in map_batches too; or leave it out (drop: [{column}])",
    )
