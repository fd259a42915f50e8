"""What identifies a row? 64 bits of its content, the same in every process, version, batch and file layout.

A null adds nothing, so a column that a new file brings, null in all old rows, does not change those. Numbers are hashed by
value: 1 and 1.0, and a date and its midnight, are equal, because a column's type may widen when files are added. Columns are
combined by name. Source of the mixer: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DataError
from penstock.ingest.columns.casts import is_text
from penstock.ingest.splitmix import GOLDEN, mix_words

__all__ = ["hash_columns", "unit_interval"]

Hashes = np.ndarray
"""uint64 [rows]; 0 stands for null."""

_GOLDEN = np.uint64(GOLDEN)

_FLOAT_TAG = np.uint64(0xF10A7)

_LIST_TAG = np.uint64(0x11575)

_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}

_DICTIONARY_MEAN_BYTES = 64

_LANES_AT_ONCE = 1 << 16
"""Words of 8 bytes that are mixed by one call: a row may have millions."""

_ENTRIES_AT_ONCE = 1 << 19
"""Entries of lists that are hashed at once: the arrays for it take ten times their bytes."""


def hash_columns(table: pa.Table, names: Iterable[str]) -> Hashes:
    """Hash each row over the named columns, of canonical types: uint64 [rows]. The order of the names does not matter.

    Raises:
        DataError: a column's type cannot be hashed.
    """
    total = np.zeros(table.num_rows, np.uint64)
    for name in names:
        try:
            chunks = [_hash_array(chunk) for chunk in table.column(name).chunks]
        except TypeError as error:
            raise DataError(
                f"column {name!r}: {error}",
                next_step="leave it out of data.columns, set data.types, or split by another column",
            ) from error
        values = np.concatenate(chunks) if chunks else np.zeros(0, np.uint64)
        total += _named(values, name)
    return _mix(total)


def unit_interval(hashes: Hashes) -> np.ndarray:
    """Map hashes to float64 [rows] in [0, 1), by their upper 53 bits."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: Hashes) -> Hashes:
    return mix_words(values + _GOLDEN)


def _named(values: Hashes, name: str) -> Hashes:
    """Bind hashes to a column's or field's name; null (0) stays 0."""
    tag = np.uint64(_digest(name.encode()))
    return np.where(values == 0, np.uint64(0), _mix(values ^ tag))


def _digest(data: bytes | memoryview) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _hash_array(array: pa.Array) -> Hashes:
    """Hash each value; nulls give 0, and no value does."""
    kind = array.type
    if pa.types.is_null(kind):
        return np.zeros(len(array), np.uint64)
    if isinstance(kind, pa.BaseExtensionType):
        return _hash_array(array.storage)
    if pa.types.is_struct(kind):
        return _hash_struct(array)
    elif pa.types.is_fixed_size_list(kind):
        values = _hash_fixed_list(array)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        values = _hash_list(array)
    elif is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        values = _hash_bytes(array)
    else:
        values = _hash_scalars(array)
    values = np.maximum(values, np.uint64(1))
    if array.null_count:
        values = np.where(array.is_null().to_numpy(zero_copy_only=False), np.uint64(0), values)
    return values


def _hash_scalars(array: pa.Array) -> Hashes:
    kind = array.type
    if pa.types.is_decimal(kind):
        return _hash_bytes(_plain_decimals(pc.cast(array, pa.string())))
    if pa.types.is_floating(kind):
        return _hash_floats(_filled(pc.cast(array, pa.float64()), 0.0))
    if pa.types.is_boolean(kind):
        return _mix(_filled(pc.cast(array, pa.uint8()), 0).astype(np.uint64))
    if pa.types.is_uint64(kind):
        return _mix(_filled(array, 0))
    if pa.types.is_integer(kind):
        return _mix(_filled(pc.cast(array, pa.int64()), 0).view(np.uint64))
    if pa.types.is_date(kind):
        return _hash_scalars(pc.cast(array, pa.timestamp("s" if pa.types.is_date32(kind) else "ms")))
    if pa.types.is_timestamp(kind):
        return _hash_fractions(_filled(pc.cast(array, pa.int64()), 0), _PER_SECOND[kind.unit])
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        ticks = pc.cast(array, pa.int32() if pa.types.is_time32(kind) else pa.int64())
        return _hash_fractions(_filled(ticks, 0).astype(np.int64), _PER_SECOND[kind.unit])
    raise TypeError(f"values of type {kind} cannot be hashed to find the split of a row")


def _plain_decimals(texts: pa.Array) -> pa.Array:
    """Hash by value: without the zeros behind the last digit, which depend on the scale, which an added file may raise."""
    texts = pc.replace_substring_regex(texts, r"(\.[0-9]*?)0+(E|$)", r"\1\2")
    texts = pc.replace_substring_regex(texts, r"\.(E|$)", r"\1")
    return pc.replace_substring_regex(texts, r"^-?0(E.*)?$", "0")


def _filled(array: pa.Array, value: float) -> np.ndarray:
    return array.fill_null(value).to_numpy(zero_copy_only=False) if array.null_count else array.to_numpy(zero_copy_only=False)


def _hash_floats(values: np.ndarray) -> Hashes:
    """Hash by value: whole numbers as integers, one NaN, one zero."""
    whole = np.abs(values) < 2.0**63
    integers = np.where(whole, values, 0.0).astype(np.int64)
    whole &= integers == values
    values = np.where(np.isnan(values), np.nan, values)
    return np.where(whole, _mix(integers.view(np.uint64)), _mix(_mix(values.view(np.uint64)) ^ _FLOAT_TAG))


def _hash_fractions(values: np.ndarray, per_second: int) -> Hashes:
    """Times of any unit: whole seconds alone, and the nanoseconds of the rest if there are any."""
    seconds, rest = np.divmod(values, per_second)
    nanoseconds = (rest * (1_000_000_000 // per_second)).astype(np.uint64)
    hashes = _mix(seconds.astype(np.int64).view(np.uint64))
    return np.where(nanoseconds == 0, hashes, _mix(hashes ^ (nanoseconds * _GOLDEN)))


def _hash_bytes(array: pa.Array) -> Hashes:
    """Text and bytes: blake2b of each value, of each distinct one where values are short and repeat."""
    array = pc.cast(array, pa.large_string() if is_text(array.type) else pa.large_binary())
    if len(array) and _num_bytes(array) <= _DICTIONARY_MEAN_BYTES * len(array):
        encoded = array.dictionary_encode()
        if len(encoded.dictionary) < len(array):
            hashes = _hash_each(encoded.dictionary)
            if not len(hashes):
                return np.zeros(len(array), np.uint64)
            return hashes[encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)]
    return _hash_each(array)


def _offsets(array: pa.Array, dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(array.buffers()[1], dtype)[array.offset : array.offset + len(array) + 1].astype(np.int64)


def _num_bytes(array: pa.Array) -> int:
    offsets = _offsets(array, np.int64)
    return int(offsets[-1] - offsets[0])


def _hash_each(array: pa.Array) -> Hashes:
    if not len(array):
        return np.zeros(0, np.uint64)
    offsets = _offsets(array, np.int64)
    data = memoryview(array.buffers()[2] or b"")
    hashes = (_digest(data[start:stop]) for start, stop in itertools.pairwise(offsets.tolist()))
    return np.fromiter(hashes, np.uint64, len(array))


def _hash_struct(array: pa.Array) -> Hashes:
    """Hash as the sum over the fields, null if all are null. An encoded image `{bytes, path}` is its bytes, at any path."""
    names = [field.name for field in array.type]
    if set(names) == {"bytes", "path"}:
        names = ["bytes"]
    total = np.zeros(len(array), np.uint64)
    for name in names:
        total += _named(_hash_array(pc.struct_field(array, name)), name)
    return np.where(total == 0, np.uint64(0), np.maximum(_mix(total), np.uint64(1)))


def _hash_fixed_list(array: pa.Array) -> Hashes:
    """Hash rows whose entries would all fit a byte as bytes, of any type: an added file may widen it."""
    size, kind = array.type.list_size, array.type.value_type
    flat = array.values.slice(array.offset * size, len(array) * size)
    if not size or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return _hash_entries(flat, len(array))
    entries = _filled(flat, 0).reshape(len(array), size)
    small = np.ones(len(array), np.bool_)
    if kind not in (pa.uint8(), pa.int8()):
        small = ((entries >= -128) & (entries <= 255) & (entries == np.trunc(entries))).all(axis=1)
    hashes = np.zeros(len(array), np.uint64)
    hashes[small] = _hash_lanes(entries[small].astype(np.int16).astype(np.uint8))
    if flat.null_count:
        absent = flat.is_null().to_numpy(zero_copy_only=False).reshape(len(array), size)[small]
        hashes[small] = np.where(absent.any(axis=1), _mix(hashes[small] ^ _hash_lanes(absent)), hashes[small])
    if not small.all():
        wide = pc.filter(flat, pa.array(np.repeat(~small, size))) if small.any() else flat
        hashes[~small] = _hash_entries(wide, int((~small).sum()))
    return hashes


def _hash_entries(flat: pa.Array, rows: int) -> Hashes:
    return _combined(flat, np.arange(rows + 1, dtype=np.int64) * (len(flat) // max(1, rows)))


def _hash_list(array: pa.Array) -> Hashes:
    large = pa.types.is_large_list(array.type)
    offsets = _offsets(array, np.int64 if large else np.int32)
    items = array.values
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    return _combined(items.slice(first, last - first), offsets - first)


def _hash_lanes(rows: np.ndarray) -> Hashes:
    """Hash rows of bytes [rows, width], 8 bytes at a time: images as raw pixels are wide."""
    width = rows.shape[1]
    padded = np.zeros((len(rows), -(-width // 8) * 8), np.uint8)
    padded[:, :width] = rows.view(np.uint8)
    lanes = padded.view("<u8").astype(np.uint64, copy=False)
    total = np.full(len(rows), _mix(np.array([width], np.uint64) ^ _LIST_TAG)[0])
    at_once = max(1, _LANES_AT_ONCE // max(1, len(rows)))
    for first in range(0, lanes.shape[1] if len(rows) else 0, at_once):
        some = lanes[:, first : first + at_once]
        total += _mix(some ^ _mix(np.arange(first, first + some.shape[1], dtype=np.uint64))).sum(axis=1, dtype=np.uint64)
    return _mix(total)


def _combined(flat: pa.Array, offsets: np.ndarray) -> Hashes:
    """Lists of items: the sum of their hashes mixed with their positions, and the length. `offsets` int64 [rows + 1]."""
    before, total = np.zeros(len(offsets), np.uint64), np.uint64(0)
    for first in range(0, len(flat), _ENTRIES_AT_ONCE):
        items = _hash_array(flat.slice(first, _ENTRIES_AT_ONCE))
        ends = np.clip(offsets - first, 0, len(items))
        positions = np.arange(first, first + len(items), dtype=np.int64) - np.repeat(offsets[:-1], np.diff(ends))
        # Mixed twice: once would be what hashes an item, and [0, 0] would equal [1, 1].
        placed = _mix(items + _mix(_mix(positions.view(np.uint64)) ^ _LIST_TAG))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(placed, dtype=np.uint64)]) + total
        before, total = np.where(ends > 0, sums[ends], before), sums[-1]
    return _mix(np.diff(before) + _mix(np.diff(offsets).view(np.uint64) ^ _LIST_TAG))
