"""Which forms may the rows for a model have, and how do they become a table in the columns and types of the source?

Taken are a pandas DataFrame, an Arrow table, a dict of columns, and a list of dicts. Values may come in any form that loses
nothing: `"12"` and `12.0` are the integer 12, `"aGk="` is bytes.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DataError
from penstock.ingest.columns.casts import canonical_type, cast_array
from penstock.ingest.columns.images import holds_images
from penstock.messages import capped, did_you_mean, shorten

__all__ = ["GivenRows", "given_rows", "raw_table", "refuse_absent"]


class GivenRows(NamedTuple):
    """Rows in the form they were given in: columns by name, of equal length."""

    columns: Mapping[str, Any]
    num_rows: int


def given_rows(given: Any) -> GivenRows:
    """Find the columns and the number of rows.

    Raises:
        DataError: it has another form, columns differ in length, or two have one name.
    """
    if isinstance(given, pa.RecordBatch):
        given = pa.Table.from_batches([given])
    if isinstance(given, pa.Table | pd.DataFrame):
        _refuse_twice([str(name) for name in (given.column_names if isinstance(given, pa.Table) else given.columns)])
    if isinstance(given, pa.Table):
        return GivenRows({name: given.column(name) for name in given.column_names}, given.num_rows)
    if isinstance(given, pd.DataFrame):
        return GivenRows({str(name): given[name] for name in given.columns}, len(given))
    if isinstance(given, Mapping):
        columns = {str(name): values for name, values in given.items()}
        lengths = {name: len(values) if _is_listed(values) else "one value" for name, values in columns.items()}
        if len(set(lengths.values())) > 1 or "one value" in lengths.values():
            raise DataError(f"the columns given differ in their number of rows: {lengths}", next_step=_FORMS)
        return GivenRows(columns, next(iter(map(len, columns.values())), 0))
    if isinstance(given, Sequence) and all(isinstance(row, Mapping) for row in given):
        names = dict.fromkeys(str(name) for row in given for name in row)
        return GivenRows({name: [row.get(name) for row in given] for name in names}, len(given))
    raise DataError(f"rows cannot be given as {type(given).__name__}", next_step=_FORMS)


_FORMS = "give a pandas DataFrame, an Arrow table, a dict of columns, or a list with a dict for each row"


def _refuse_twice(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise DataError(
            f"the rows given have two columns {twice!r}", next_step=f"give one column {twice!r}, the one that the source has"
        )


def _is_listed(values: Any) -> bool:
    if isinstance(values, np.ndarray):
        return values.ndim > 0
    return isinstance(values, list | tuple | pd.Series | pa.Array | pa.ChunkedArray)


def raw_table(given: GivenRows, schema: pa.Schema, unneeded: Collection[str]) -> tuple[pa.Table, dict[int, str]]:
    """Convert rows to the source's columns and types; a column of `unneeded` becomes nulls.

    Returns:
        The table, with a null for each value that does not fit its column; and row -> problem.

    Raises:
        DataError: a column is missing.
    """
    refuse_absent([str(name) for name in given.columns], schema, unneeded)
    columns, problems = [], dict[int, str]()
    for field in schema:
        if field.name in unneeded:
            columns.append(pa.nulls(given.num_rows, field.type))
            continue
        values, wrong = _typed(given.columns[field.name], field.type)
        columns.append(values)
        for row, value in wrong.items():
            kind = "bytes (in JSON: Base64)" if _may_be_encoded(field.type) else field.type
            problems.setdefault(row, f"row {row}: column {field.name!r} holds {value}, which does not read as {kind}")
    return pa.table(columns, schema=schema), problems


def refuse_absent(present: Sequence[str], schema: pa.Schema, unneeded: Collection[str]) -> None:
    """Raise DataError if rows with the columns `present` lack a needed column of the schema."""
    absent = [name for name in schema.names if name not in present and name not in unneeded]
    if absent:
        others = [name for name in present if name not in schema.names]
        raise DataError(
            f"the rows given have no column {absent[0]!r}"
            + (f", nor {', '.join(map(repr, absent[1:6]))}" if len(absent) > 1 else "")
            + (f" (of {len(absent)} that are missing)" if len(absent) > 6 else "")
            + f"; they have {', '.join(capped([*present])) or 'none'}"
            + did_you_mean(absent[0], others),
            next_step="give what is missing as the source has it: "
            + ", ".join(capped([f"{name} ({schema.field(name).type})" for name in absent])),
        )


def _typed(values: Any, kind: pa.DataType) -> tuple[pa.Array | pa.ChunkedArray, dict[int, str]]:
    """Convert a column; returns it with nulls for values that do not fit, and those values by row."""
    with_errors = (pa.ArrowException, TypeError, ValueError, OverflowError)
    try:
        return _converted(values, kind), {}
    except with_errors:
        made, wrong = [], dict[int, str]()
        for row, value in enumerate(_listed(values)):
            try:
                made.append(_converted([value], kind))
            except with_errors:
                made.append(pa.nulls(1, kind))
                wrong[row] = shorten(value)
        return pa.chunked_array(made, kind), wrong


def _listed(values: Any) -> list[Any]:
    return values.to_pylist() if isinstance(values, pa.Array | pa.ChunkedArray) else list(values)


def _converted(values: Any, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return _cast(values, kind)
    if isinstance(values, pd.Series) and isinstance(values.dtype, np.dtype):
        values = values.to_numpy()  # from a Series Arrow takes five times as long
    if isinstance(kind, pa.FixedShapeTensorType):
        flat = [None if value is None else np.asarray(value).reshape(-1) for value in values]
        return pa.ExtensionArray.from_storage(kind, _converted(flat, kind.storage_type))
    if isinstance(values, np.ndarray) and values.ndim > 1:
        values = list(values) if values.ndim == 2 else values.tolist()
    first = next((value for value in values if value is not None), None) if _may_be_encoded(kind) else None
    if holds_images(kind) and isinstance(first, bytes | bytearray | memoryview | str):
        values = [None if value is None else {"bytes": _bytes_of(value)} for value in values]
    elif isinstance(first, str):
        values = [None if value is None else _bytes_of(value) for value in values]
    # In a column of floats NaN is a value; elsewhere pandas writes null as NaN.
    missing = not pa.types.is_floating(kind)
    try:
        made = pa.array(values, from_pandas=missing)
        by_python = not isinstance(values, np.ndarray | pd.Series) or values.dtype.kind == "O"
        if by_python and pa.types.is_floating(made.type) and any(isinstance(value, bool) for value in values):
            raise TypeError("a truth value is not a number")  # Arrow makes 1.0 of it behind a float
        return _cast(made, kind)
    except OverflowError:  # Arrow tries 64 bits with a sign first
        return pa.array(values, kind)
    except pa.ArrowException:
        if not pa.types.is_nested(kind):
            raise
        return pa.array(values, kind)  # fields in another order, or some left out


def _cast(values: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    """Cast as `cast_array`, which mixes times, numbers and truth values, but refuse that."""
    if values.type == kind:
        return values
    found = canonical_type(values.type)
    if pa.types.is_boolean(found) and not pa.types.is_boolean(kind):
        raise TypeError("a truth value is not another type")
    if (_is_number(found) and pa.types.is_temporal(kind)) or (pa.types.is_temporal(found) and _is_number(kind)):
        raise TypeError("a time is not a number")
    made = cast_array(values, kind)
    if pa.types.is_boolean(kind) and _is_number(found) and not pc.cast(made, found).equals(pc.cast(values, found)):
        raise ValueError("a number that is neither 0 nor 1 is not a truth value")
    return made


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _may_be_encoded(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or holds_images(kind))


def _bytes_of(value: Any) -> bytes:
    """Return bytes unchanged, and decode text as Base64."""
    if not isinstance(value, str):
        return bytes(value)
    try:
        return base64.b64decode("".join(value.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"text that is not Base64: {error}") from error
