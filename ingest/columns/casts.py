"""Which Arrow type does a column have once all files are looked at?

Files of one dataset may differ in ways that lose nothing (int32 beside int64, null beside anything): `promote` finds the common
type or reports that there is none, `cast_array` converts to it and refuses to lose anything on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["canonical_type", "cast_array", "first_bad_row", "fits_double", "is_list", "is_rounded", "is_text", "promote"]

_INTEGER = r"^\s*[+-]?[0-9]+(\.0*)?\s*$"

_BITS = {64: 53, 32: 24, 16: 11}
"""Width of a float -> bits of its integers."""

_EXPONENTS = {64: 1024, 32: 128, 16: 16}

_UNIT_ORDER = ("s", "ms", "us", "ns")


def canonical_type(kind: pa.DataType) -> pa.DataType:
    """Strip what is only layout of values: dictionaries, views, run ends, unknown extensions, nullability.

    Views of lists stay what they are, and are refused where files are unified: pyarrow's cast of them loses rows after a null.
    """
    if isinstance(kind, pa.FixedShapeTensorType):
        return kind
    if isinstance(kind, pa.Bool8Type):
        return pa.bool_()
    if isinstance(kind, pa.BaseExtensionType):
        return canonical_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return canonical_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, canonical_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(canonical_type(kind.key_type), canonical_type(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(canonical_type(kind.value_type), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(canonical_type(kind.value_type))
    if pa.types.is_list(kind):
        return pa.list_(canonical_type(kind.value_type))
    return kind


def promote(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """Return the narrowest canonical type that holds the values of both, or None if a conversion would change their meaning."""
    if first == second:
        return first
    if pa.types.is_null(first):
        return second
    if pa.types.is_null(second):
        return first
    if any(test(first) and test(second) for test in _WIDENED):
        return _wider(first, second)
    if _is_number(first) and _is_number(second):
        if pa.types.is_floating(first) or pa.types.is_floating(second):
            return pa.float64()
        return None if pa.uint64() in (first, second) else pa.int64()
    if _is_time_point(first) and _is_time_point(second):
        return _finer_time(first, second)
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        return _joined_struct(first, second)
    if is_list(first) and is_list(second):
        inner = promote(first.value_type, second.value_type)
        same_size = pa.types.is_fixed_size_list(first) and pa.types.is_fixed_size_list(second)
        if inner is None or (same_size and first.list_size != second.list_size):
            return None
        if same_size:
            return pa.list_(inner, first.list_size)
        if pa.types.is_fixed_size_list(first) or pa.types.is_fixed_size_list(second):
            return None
        # pyarrow's JSON reader knows no large lists.
        return pa.list_(inner) if pa.types.is_list(first) and pa.types.is_list(second) else pa.large_list(inner)
    return None


def _wider(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """Return the type that holds the values of two types of one family; None if there is none, of decimals with many digits."""
    both = [pa.schema([("", kind)]) for kind in (first, second)]
    try:
        return pa.unify_schemas(both, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None


def _finer_time(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    stamps = [kind for kind in (first, second) if pa.types.is_timestamp(kind)]
    if not stamps:
        return pa.date64()
    zones = {kind.tz for kind in stamps}
    if len(zones) > 1 and (None in zones or len(stamps) < 2):
        return None  # a time without zone is not a moment
    unit = max((kind.unit for kind in stamps), key=_UNIT_ORDER.index)
    return pa.timestamp(unit, stamps[0].tz if len(zones) == 1 else "UTC")


def _joined_struct(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    right = {field.name: field.type for field in second}
    fields = []
    for field in first:
        kind = promote(field.type, right.pop(field.name, pa.null()))
        if kind is None:
            return None
        fields.append(pa.field(field.name, kind))
    return pa.struct([*fields, *(pa.field(name, kind) for name, kind in right.items())])


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _is_time_point(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds strings."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether it is a list, whichever size its rows have."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


_WIDENED = (
    *(pa.types.is_signed_integer, pa.types.is_unsigned_integer, pa.types.is_floating, pa.types.is_decimal),
    *(pa.types.is_duration, pa.types.is_time, is_text, _is_bytes),
)
"""Families of types within which the wider of two holds the values of both."""


def cast_array(values: pa.ChunkedArray | pa.Array, kind: pa.DataType) -> pa.ChunkedArray | pa.Array:
    """Cast without losing anything, but that doubles may become float32. Text is trimmed, and `17850.0` may become 17850.

    Raises:
        pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError: a value does not fit, or no such conversion exists.
    """
    if values.type == kind:
        return values
    if isinstance(values.type, pa.BaseExtensionType) and not isinstance(kind, pa.BaseExtensionType):
        chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
        is_bool8 = isinstance(values.type, pa.Bool8Type)
        values = pa.chunked_array([chunk.storage for chunk in chunks], type=values.type.storage_type)
        values = pc.not_equal(values, 0) if is_bool8 else values  # 2 and -1 are true, too
    if pa.types.is_run_end_encoded(values.type):
        values = pc.run_end_decode(values)
    if pa.types.is_null(kind):
        if values.null_count < len(values):
            raise pa.ArrowInvalid("a value in a column where only nulls were seen")
        return pa.nulls(len(values))
    if is_text(values.type) and not is_text(kind) and not _is_bytes(kind):
        return _cast_text(values, kind)
    made = pc.cast(values, kind)
    if _is_lossy(values, made):
        raise pa.ArrowInvalid(f"a value of type {values.type} is another one as {kind}")
    return made


def _cast_text(text: pa.ChunkedArray | pa.Array, kind: pa.DataType) -> pa.ChunkedArray | pa.Array:
    try:
        made = pc.cast(text, kind)
    except pa.ArrowInvalid:
        text = pc.utf8_trim_whitespace(text)
        # `17850.0` and `+1` are integers; by way of a double, all integers beside them would be rounded.
        made = pc.cast(pc.cast(text, pa.decimal128(38, 0)) if pa.types.is_integer(kind) else text, kind)
    if pa.types.is_floating(kind) and is_rounded(text, kind.bit_width):
        raise pa.ArrowInvalid("an integer that would be rounded")
    return made


def is_rounded(text: pa.ChunkedArray | pa.Array, width: int = 64) -> bool:
    """Whether there is an integer, such as `5` or `5.0`, among the cells that a float of this width would round."""
    long = pc.filter(text, pc.greater(pc.binary_length(text), width // 4 - 1))  # 15, 7 and 3 digits are always exact
    if not len(long):
        return False
    # By two plain searches: an expression takes ten times as long.
    with_point = pc.or_(pc.match_substring(long, ".0"), pc.ends_with(long, "."))
    long = pc.filter(long, pc.or_(pc.invert(pc.match_substring(long, ".")), with_point))
    integers = pc.filter(long, pc.match_substring_regex(long, _INTEGER))
    return any(not fits_double(int(value.partition(".")[0]), width) for value in integers.to_pylist())


def fits_double(value: int, width: int = 64) -> bool:
    """Whether a double, or a float of another width, holds the integer exactly.

    The one rule of all readers: what it refuses is never rounded silently.
    """
    zeros = (value & -value).bit_length() - 1 if value else 0
    return value.bit_length() - zeros <= _BITS[width] and value.bit_length() <= _EXPONENTS[width]


def _is_lossy(values: pa.ChunkedArray | pa.Array, made: pa.ChunkedArray | pa.Array) -> bool:
    """Whether `made`, cast from `values`, has lost what pyarrow does not look at: truth values, times, zones, decimals."""
    old, new = values.type, made.type
    if is_list(old) and is_list(new):
        return _is_lossy(pc.list_flatten(values), pc.list_flatten(made))
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        names = {field.name for field in old} & {field.name for field in new}
        return any(_is_lossy(pc.struct_field(values, name), pc.struct_field(made, name)) for name in names)
    if pa.types.is_timestamp(old):
        if pa.types.is_time(new) or (pa.types.is_timestamp(new) and (old.tz is None) != (new.tz is None) and new.tz != "UTC"):
            return True
        return pa.types.is_date(new) and not pc.all(pc.equal(pc.cast(made, old), values)).as_py()
    if pa.types.is_boolean(new) and _is_number(old):
        return not pc.all(pc.equal(pc.cast(made, old), values)).as_py()
    if pa.types.is_decimal(old) and pa.types.is_floating(new):
        large = pc.filter(values, pc.greater_equal(pc.abs(pc.cast(made, pa.float64())), 2 ** _BITS[new.bit_width]))
        return not all(fits_double(int(value), new.bit_width) for value in large.drop_null().to_pylist() if value == int(value))
    if pa.types.is_decimal(new) and pa.types.is_floating(old):
        doubles = pc.cast(values, pa.float64())
        off = pc.abs(pc.subtract(pc.cast(made, pa.float64()), doubles))
        allowed = 1e-15 if old == pa.float64() else 1e-7
        return not pc.all(pc.less_equal(off, pc.multiply(pc.abs(doubles), allowed))).as_py()
    return False


def first_bad_row(
    values: pa.ChunkedArray | pa.Array, kind: pa.DataType, cast: Callable[[Any, pa.DataType], Any] = cast_array
) -> int:
    """Index of the first value that `cast` refuses, found by halving; the cast of the whole must have failed."""
    low, high = 0, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            cast(values.slice(low, middle - low), kind)
        except pa.ArrowException:
            high = middle
        else:
            low = middle
    return low
