"""Types written as text read back as themselves, and promotion loses nothing."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ingest.columns.casts import promote
from penstock.ingest.columns.type_text import parse_type, type_text

SCALARS = [
    *(pa.null(), pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float64(), pa.string(), pa.large_string(), pa.binary()),
    *(pa.binary(7), pa.large_binary(), pa.date32(), pa.date64(), pa.time32("s"), pa.time64("ns"), pa.duration("ms")),
    *(pa.timestamp("us"), pa.timestamp("s", "Europe/Rome"), pa.decimal128(10, 2), pa.decimal256(50, -3)),
]
NAMES = st.one_of(
    st.sampled_from(["a", "b.c", "x y", 'q"', "a: b>", "", "ü", "list<"]),
    st.text(max_size=3).filter(lambda text: text.isprintable()),
)
TYPES = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        st.tuples(inner, st.integers(0, 9)).map(lambda pair: pa.list_(*pair)),
        st.tuples(st.sampled_from(SCALARS[1:]), inner).map(lambda pair: pa.map_(*pair)),
        st.dictionaries(NAMES, inner, max_size=3).map(lambda fields: pa.struct(list(fields.items()))),
    ),
    max_leaves=5,
)


@given(TYPES)
def test_a_type_reads_back_from_its_text(kind: pa.DataType) -> None:
    assert parse_type(type_text(kind)) == kind


def test_tensors_read_back_too() -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 3])
    assert parse_type(type_text(kind)) == kind


@pytest.mark.parametrize("text", ["int46", "list<int8", "list<int8>>", "", "struct<a int8>", "fixed_size_list<int8>"])
def test_what_is_no_type_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_type(text)


@given(TYPES, TYPES)
def test_promotion_does_not_hang_on_the_order_of_files(first: pa.DataType, second: pa.DataType) -> None:
    there, back = promote(first, second), promote(second, first)
    if pa.types.is_struct(first) or pa.types.is_nested(first):
        assert (there is None) == (back is None)
    else:
        assert there == back


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.int64(), pa.float32(), pa.float64()),
        (pa.uint8(), pa.int8(), pa.int64()),
        (pa.uint64(), pa.int8(), None),
        (pa.null(), pa.list_(pa.int8()), pa.list_(pa.int8())),
        (pa.string(), pa.int64(), None),
        (pa.bool_(), pa.int64(), None),
        (pa.date32(), pa.timestamp("ms"), pa.timestamp("ms")),
        (pa.timestamp("s"), pa.timestamp("s", "UTC"), None),
        (
            pa.struct({"a": pa.int8()}),
            pa.struct({"a": pa.int16(), "b": pa.string()}),
            pa.struct({"a": pa.int16(), "b": pa.string()}),
        ),
        (pa.list_(pa.int8(), 3), pa.list_(pa.int8(), 4), None),
    ],
)
def test_types_meet_where_nothing_is_lost(first: pa.DataType, second: pa.DataType, common: pa.DataType | None) -> None:
    assert promote(first, second) == common
