"""The type of a column of text cells is that of all its cells, and integers are exact or refused."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ingest.columns.casts import is_rounded
from penstock.ingest.formats import cell_types
from penstock.ingest.formats.cell_types import NULL_WORDS, CellTypes, without_words
from penstock.ingest.formats.json_text import has_long_integer

_ODD = ["007", "0x1F", "-0", "1e5", ".5", "+.5", "9" * 19, "-" + "9" * 18, "9" * 20, "-0.1234567890123456789", "1.5", "true"]
_CELLS = st.lists(
    st.none()
    | st.sampled_from([*_ODD, *NULL_WORDS.to_pylist()])
    | st.integers(-(10**21), 10**21).map(str)
    | st.floats(allow_nan=False).map(repr)
    | st.text(alphabet="0123456789+-.eExXNAna# \u00a0ä", max_size=22),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(cells=_CELLS, skipped=st.integers(0, 2))
def test_cells_in_doubt_are_all_that_expressions_match(cells: list[str | None], skipped: int) -> None:
    text = pa.array(cells, pa.string())[min(skipped, len(cells)) :]
    absent = pc.is_in(text, NULL_WORDS)
    values = without_words(text, NULL_WORDS)
    assert values.to_pylist() == pc.if_else(absent, None, text).to_pylist()
    trimmed = pc.utf8_trim_whitespace(values)
    has_name = bool(pc.any(pc.match_substring_regex(trimmed, r"^[+-]?(0[0-9xX]|[0-9]{20})")).as_py())
    assert cell_types._are_numbers(values).tolist() == [bool(value and _NUMBER.search(value)) for value in values.to_pylist()]
    assert cell_types._has_name_of_digits(trimmed) == has_name
    found = (re.fullmatch(r"\s*([+-]?[0-9]+)(\.0*)?\s*", value or "", re.ASCII) for value in values.to_pylist())
    integers = [int(match[1]) for match in found if match]
    assert is_rounded(values) == any(int(float(value)) != value for value in integers)


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["1", "-2", "300"], pa.int64()),
        ([*["1"] * 40, "2.5"], pa.float64()),
        ([*["1"] * 40, "007"], pa.string()),
        ([*["0.5"] * 40, "1234567890123456789"], pa.string()),
        ([" 1", "2 "], pa.int64()),
        (["+1", "-1", ""], pa.int64()),
        (["+1", " -1.5"], pa.float64()),
        (["791557233689870338", "1.25018E+17"], pa.string()),
        (["10000000000000000", "0.5"], pa.float64()),
        (["NA", "nan", "3"], pa.int64()),
        (["NA", ""], pa.null()),
        (["2020-01-01", "2020-01-01 10:00:00"], pa.timestamp("s")),
    ],
)
def test_a_column_has_the_type_that_all_its_cells_fit(cells: list[str], kind: pa.DataType) -> None:
    column = CellTypes(NULL_WORDS)
    column.see(pa.array(cells), 0)
    assert column.kind == kind


_NUMBER = re.compile(cell_types._NUMBER, re.ASCII)

_LONG = re.compile(rb"(?<![0-9.])[0-9]{16,}(\.0*)?(?![0-9.eE])")


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from([b"1" * 15, b"2" * 16, b"3" * 31, b".", b"0", b"e", b" ", b"-", b"\n", b"\r\n", b"{}", b","])
    )
)
def test_long_integers_are_found_by_their_bytes(parts: list[bytes]) -> None:
    text = b"".join(parts)
    assert has_long_integer(text) == bool(_LONG.search(text))
    assert has_long_integer(text, 32) == bool(re.search(rb"(?<![0-9.])[0-9]{8,}(\.0*)?(?![0-9.eE])", text))
