"""What a few bytes of a cell or of a line rule out is what reading all of it would have ruled out."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ingest.formats.cells import cell_types
from penstock.ingest.formats.cells.cell_bytes import CellBytes
from penstock.ingest.formats.cells.cell_types import NULL_WORDS, CellTypes, NullWords, rounds
from penstock.ingest.formats.json_text import count_lines, has_long_integer

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
def test_cells_are_typed_as_regular_expressions_and_words_over_all_of_them_say(cells: list[str | None], skipped: int) -> None:
    text = pa.array(cells, pa.string())[min(skipped, len(cells)) :]
    absent = pc.is_in(text, NULL_WORDS)
    values = NullWords().without(text)
    assert values.to_pylist() == pc.if_else(absent, None, text).to_pylist()
    seen = CellBytes(values)
    found = cell_types._are_numbers(values, seen)
    assert found.tolist() == pc.match_substring_regex(values, cell_types._NUMBER).fill_null(False).to_pylist()
    for pattern in (cell_types._LONG_INTEGER, cell_types._DIGITS_OF_A_NAME):
        assert cell_types._any_like(values, seen, pattern) == bool(pc.any(pc.match_substring_regex(values, pattern)).as_py())


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["1", "-2", "300"], pa.int64()),
        ([*["1"] * 40, "2.5"], pa.float64()),
        ([*["1"] * 40, "007"], pa.string()),
        ([*["0.5"] * 40, "1234567890123456789"], pa.string()),
        ([" 1", "2 "], pa.int64()),
        (["NA", "nan", "3"], pa.int64()),
        (["NA", ""], pa.null()),
        (["2020-01-01", "2020-01-01 10:00:00"], pa.timestamp("s")),
    ],
)
def test_a_column_has_the_type_that_all_its_cells_fit(cells: list[str], kind: pa.DataType) -> None:
    column = CellTypes(NullWords())
    column.see(pa.array(cells), 0)
    assert column.kind == kind


def test_an_integer_that_a_double_rounds_is_found_among_long_fractions() -> None:
    fractions = [repr(value) for value in np.linspace(-1, 1, 50).tolist()]
    text = pa.array(fractions)
    assert not rounds(text, CellBytes(text))
    text = pa.array([*fractions, "-1234567890123456789"])
    assert rounds(text, CellBytes(text))


_LONG = re.compile(rb"(?<![0-9.])[0-9]{16,}(?![0-9.eE])")


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.sampled_from([b"1" * 15, b"2" * 16, b"3" * 31, b".", b"e", b" ", b"-", b"\n", b"\r\n", b"{}", b","])),
)
def test_long_integers_and_lines_are_found_by_their_bytes(parts: list[bytes]) -> None:
    text = b"".join(parts)
    assert has_long_integer(text) == bool(_LONG.search(text))
    assert count_lines(text) == (sum(1 for line in text.split(b"\n") if line.strip()), text.count(b"\n"))
