"""What does each preprocessing step do to a table of rows? Numpy and Arrow only, so that a serving process needs no Ray.

The formulas are those of ray.data.preprocessors; a test compares the two. Ray's own transforms are not
used here because they go through pandas for most kinds, where an integer column with a null turns into floats.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DataError
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.columns.casts import first_bad_row
from penstock.ingest.columns.fixed_shape import (
    cast_column,
    fixed_shape,
    is_number,
    is_text,
    missing_values,
    numbers,
)
from penstock.ingest.columns.type_text import parse_type
from penstock.ingest.preprocess.decode_images import decode_images
from penstock.ingest.preprocess.fitted import ColumnState, FittedStep
from penstock.ingest.preprocess.ragged_lists import ragged_lists
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.steps import columns_of_step
from penstock.ingest.spec import DataSpec
from penstock.messages import shorten

__all__ = ["KEEP", "apply_step"]


_JOINED_ROWS = 1024
"""Rows whose columns are put side by side at once: they stay in the processor's cache until they are whole."""

KEEP = "_keep"
"""A boolean column that a map_batches function may add: rows where it is false are left out and counted."""


def apply_step(rows: Rows, fitted: FittedStep, data: DataSpec, functions: Mapping[str, Any]) -> None:
    """Apply one step to `rows` in place.

    Args:
        functions: the user's functions by their `map_batches` target.

    Raises:
        DataError: the step cannot be applied to these columns, whatever the rows hold; or user code failed.
    """
    step = fitted.step
    if step.rename is not None:
        _rename(rows, step.rename)
    elif step.drop is not None:
        _require(rows, step.drop, "drop")
        rows.table = rows.table.drop_columns(step.drop)
    elif step.cast is not None:
        _require(rows, list(step.cast), "cast")
        for name, kind in step.cast.items():
            _cast(rows, name, parse_type(kind))
    elif step.imputer is not None:
        _impute(rows, fitted, data)
    elif step.kind in ("one_hot", "ordinal", "label_encoder"):
        _require(rows, [state.column for state in fitted.columns], step.kind)
        for state in fitted.columns:
            _encode(rows, state, step.kind)
    elif step.concatenator is not None:
        _concatenate(rows, fitted, data)
    elif step.decode_image is not None:
        options = step.decode_image
        _require(rows, [options.column], "decode_image")
        size, mode = options.size or data.images.size, options.mode or data.images.mode
        decode_images(rows, options.column, size, mode, keep_encoded=options.keep == "encoded")
    elif step.ragged is not None:
        lists = step.ragged
        _require(rows, lists.columns, "ragged")
        for name in lists.columns:
            values = rows.column(name)
            made = ragged_lists(name, values, lists)
            rows.put(name, made)
            rows.reject_missing(name)
    elif step.null_mask is not None:
        _require(rows, step.null_mask.columns, "null_mask")
        for name in step.null_mask.columns:
            if name == data.label:
                raise DataError(
                    f"preprocess: null_mask: column {name!r} is the label, and 0 is no label",
                    next_step="correct the labels in the source, or leave such rows out (data.invalid: drop)",
                )
            _mask_nulls(rows, name)
    elif step.map_batches is not None:
        call = step.map_batches
        _call(rows, call.function, functions[call.function], call.params)
    else:
        _require(rows, [state.column for state in fitted.columns], step.kind)
        for state in fitted.columns:
            _scale(rows, state, step.kind)


def _require(rows: Rows, names: list[str], kind: str) -> None:
    present = rows.table.column_names
    missing = [name for name in names if name not in present]
    if missing:
        raise DataError(
            f"preprocess: {kind}: there is no column {missing[0]!r} at this step; the rows have {', '.join(present)}",
            next_step=f"correct preprocess.{kind}, or the steps before it",
        )


def _rename(rows: Rows, names: dict[str, str]) -> None:
    _require(rows, list(names), "rename")
    renamed = [names.get(name, name) for name in rows.table.column_names]
    twice = sorted({name for name in renamed if renamed.count(name) > 1})
    if twice:
        raise DataError(
            f"preprocess: rename gives two columns the name {twice[0]!r}", next_step="drop one, or choose another name"
        )
    rows.table = rows.table.rename_columns(renamed)


def _cast(rows: Rows, name: str, kind: pa.DataType) -> None:
    values = rows.column(name)
    try:
        rows.put(name, cast_column(values, kind))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        row = first_bad_row(values, kind)
        raise DataError(
            f"preprocess: cast: {rows.origin.place(row)}: {name} holds {shorten(values[row].as_py())}, "
            f"which does not become {kind} without loss",
            next_step="cast it to another type, or repair the row",
        ) from error


def _scale(rows: Rows, state: ColumnState, kind: str) -> None:
    values = rows.column(state.column)
    if not is_number(values.type):
        raise DataError(f"preprocess: {kind} was fitted on numbers, and column {state.column!r} is {values.type} here")
    wide = values.cast(pa.float64(), safe=False)
    scaled = wide.to_numpy(zero_copy_only=False) - state.center
    scaled /= state.scale
    missing = wide.is_null().to_numpy(zero_copy_only=False) if wide.null_count else None
    rows.put(state.column, pa.array(scaled.astype(np.float32), mask=missing))


def _impute(rows: Rows, fitted: FittedStep, data: DataSpec) -> None:
    options = fitted.step.imputer
    assert options is not None
    fills = {state.column: state.fill for state in fitted.columns}
    if not fitted.columns:
        names = columns_of_step(fitted.step, rows.table.schema, data.label)
        fills = dict.fromkeys(names, options.fill_value)
    _require(rows, list(fills), "imputer")
    for name, fill in fills.items():
        values = rows.column(name)
        if options.strategy == "mean":
            values = values.cast(pa.float64(), safe=False)
        if pa.types.is_floating(values.type):
            values = pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)
        try:
            rows.put(name, pc.fill_null(values, pa.scalar(fill, values.type)))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(f"preprocess: imputer: {fill!r} is no value for column {name!r} of type {values.type}") from error


def _mask_nulls(rows: Rows, name: str) -> None:
    values, mask = rows.column(name), f"{name}_is_null"
    if not is_number(values.type):
        raise DataError(
            f"preprocess: null_mask cannot take column {name!r} of type {values.type}",
            next_step=f"encode it first (ordinal: {{columns: [{name}]}})"
            if is_text(values.type)
            else f"it takes columns of one number a row; cast this one first, or leave it out (drop: [{name}])",
        )
    if mask in rows.table.column_names:
        raise DataError(f"preprocess: null_mask: there is a column {mask!r} already", next_step="rename it")
    missing = pc.is_null(values, nan_is_null=True)
    rows.put(name, pc.if_else(missing, pa.scalar(0, pa.int64()).cast(values.type), values))
    rows.put(mask, missing.cast(pa.uint8()))


def _encode(rows: Rows, state: ColumnState, kind: str) -> None:
    name, categories = state.column, state.categories or ()
    rows.reject_missing(name)
    values = rows.column(name)
    try:
        keys = pa.array(categories).cast(values.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"preprocess: {kind} was fitted on other values than column {name!r} of type {values.type} holds"
        ) from error
    codes = pc.index_in(values, keys)
    unseen = codes.is_null().to_numpy(zero_copy_only=False)
    if kind == "one_hot":
        if unseen.any():
            rows.unseen[name] = rows.unseen.get(name, 0) + int(unseen.sum())
        vectors = np.zeros((len(values), len(categories)), np.float32)
        vectors[np.flatnonzero(~unseen), pc.drop_null(codes).to_numpy()] = 1
        rows.put(name, tensor_array(vectors))
        return
    rows.reject(unseen, "unknown category", name, lambda row: shorten(values[row].as_py()))
    rows.put(name, pc.drop_null(codes).cast(pa.int64()))


def _concatenate(rows: Rows, fitted: FittedStep, data: DataSpec) -> None:
    options = fitted.step.concatenator
    assert options is not None
    names = columns_of_step(fitted.step, rows.table.schema, data.label)
    if options.output in rows.table.column_names and options.output not in names:
        raise DataError(
            f"preprocess: concatenator: there is a column {options.output!r} already", next_step="choose another output"
        )
    for name in names:
        rows.reject_missing(name)
        if not rows.table.num_rows:
            return
        column = fixed_shape(name, rows.column(name), is_label=False)
        if not isinstance(column, pa.Array):
            raise ragged_error(name, column.length, column.expected, rows.origin.place(column.row))
        rows.put(name, column)
        if isinstance(column.type, pa.FixedShapeTensorType):
            rows.reject_missing(name)
    count = rows.table.num_rows
    if not count:
        return
    parts = [numbers(rows.column(name)).reshape(count, -1) for name in names]
    joined = np.empty((count, sum(part.shape[1] for part in parts)), options.dtype)
    for start in range(0, count, _JOINED_ROWS):
        np.concatenate([part[start : start + _JOINED_ROWS] for part in parts], axis=1, out=joined[start : start + _JOINED_ROWS])
    rows.table = rows.table.drop_columns(names)
    rows.put(options.output, tensor_array(joined))


def ragged_error(name: str, length: int, expected: int, place: str) -> DataError:
    """The error for lists of unequal length."""
    return DataError(
        f"column {name!r} holds lists of unequal length: {place} has {length} elements and a row before it {expected}",
        next_step=f"keep them as they are (ragged: {{columns: [{name}]}}), cut or pad them in a map_batches function, "
        f"or leave the column out (drop: [{name}])",
    )


def _call(rows: Rows, target: str, function: Callable[..., Any], params: dict[str, Any]) -> None:
    """Give the rows to the user's function as numpy arrays, and check what comes back."""
    count = rows.table.num_rows
    where = f"{rows.origin.place(0)} and the {count - 1} rows after it"
    batch = {name: _as_numpy(rows.column(name)) for name in rows.table.column_names}
    try:
        result = function(batch, **params)
    except Exception as error:  # the user's code: whatever it raises is told with its place
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"map_batches {target} raised {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})",
            problems=[f"it was given {where}"],
            next_step=f"correct {target}; it gets a dict of numpy arrays with the columns {', '.join(batch)}",
        ) from error
    if not isinstance(result, dict) or not result:
        raise DataError(f"map_batches {target} returned {type(result).__name__}; it must return a dict of column name to array")
    columns = {name: _from_numpy(target, name, values, count) for name, values in result.items()}
    keep = columns.pop(KEEP, None)
    rows.table = pa.table(columns)
    if keep is not None:
        rows.filter(np.asarray(result[KEEP]).astype(np.bool_))


def _as_numpy(values: pa.Array) -> np.ndarray:
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
    objects[:] = values.to_pylist() if not pa.types.is_nested(values.type) else [_element(value) for value in values]
    return objects


def _element(value: pa.Scalar) -> Any:
    plain = value.as_py()
    return np.asarray(plain) if isinstance(plain, list) else plain


def _writable(values: np.ndarray) -> np.ndarray:
    return values if values.flags.writeable else values.copy()


def _as_rows(array: np.ndarray) -> np.ndarray:
    rows = np.empty(len(array), object)
    rows[:] = [np.asarray(row.tolist()) for row in array]
    return rows


def _joined_lists(array: np.ndarray) -> pa.Array | None:
    """An array of one-dimensional arrays of numbers, or None, as lists in the dtype of those that are not empty."""
    if array.dtype != object or array.ndim != 1 or not any(isinstance(value, np.ndarray) for value in array):
        return None
    missing = np.array([value is None for value in array])
    rows = [np.empty(0) if value is None else value for value in array]
    if not all(isinstance(row, np.ndarray) and row.ndim == 1 and row.dtype.kind in "biuf" for row in rows):
        return None
    filled = [row for row in rows if len(row)] or rows[:1]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(row) for row in rows])])
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(filled)), mask=pa.array(missing))


def _from_numpy(target: str, name: str, values: Any, count: int) -> pa.Array:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(f"map_batches {target}: column {name!r} is no array of one shape: {error}") from error
    if array.ndim == 0 or len(array) != count:
        got = "a scalar" if array.ndim == 0 else f"{len(array)} rows"
        raise DataError(
            f"map_batches {target}: column {name!r} came back with {got} for {count} rows; the number of rows must stay",
            next_step=f"to leave rows out, return a boolean column {KEEP!r} with False for them",
        )
    if array.dtype.kind in "biuf":
        return tensor_array(array)
    try:
        if array.dtype == object and array.ndim == 2:  # what numpy makes of lists that happen to have one length
            array = _as_rows(array)
        lists = _joined_lists(array)
        if lists is not None:
            return lists
        if array.dtype == object and len(array) and isinstance(array[0], np.ndarray):
            return pa.array([None if value is None else np.asarray(value).tolist() for value in array])
        return pa.array(array.tolist() if array.dtype.kind in "OUS" else array, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"map_batches {target}: column {name!r} of dtype {array.dtype} cannot be kept: {error}") from error
