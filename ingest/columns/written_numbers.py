"""Do the texts of a column look like numbers in another notation, and what makes numbers of them?"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from penstock.messages import in_yaml, shorten

__all__ = ["WrittenNumbers", "written_numbers"]

_LOOKED_AT = 1000
"""Rows."""

_MOSTLY = 0.9

_GROUPED = r"[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?"
_POINTED = r"[+-]?[0-9]{1,3}(\.[0-9]{3})+(,[0-9]+)?"
_DECIMAL = 'in CSV files data.csv: {{decimal: ","}} reads it'


class WrittenNumbers(NamedTuple):
    """Description of a column of such texts."""

    seen: str
    """The kind of number, with an example."""
    advice: str


class _Notation(NamedTuple):
    form: str
    seen: str
    advice: str


_NOTATIONS = (
    _Notation(
        r"[+-]?[0-9]{19,}",
        "whole numbers of more than 64 bits",
        "cast: {{{name}: float64}} rounds them; drop: [{name}] leaves them out, if they only name things",
    ),
    _Notation(
        rf"{_GROUPED}|[+-]?[0-9]{{1,3}}(\.[0-9]+)?",
        "numbers with commas between thousands",
        f"map_batches with a function that takes the commas out (docs/recipe.md); if they are decimal marks, {_DECIMAL}",
    ),
    _Notation(r"[+-]?[0-9]*(,[0-9]+)?", "numbers with a decimal comma", _DECIMAL),
    _Notation(
        rf"{_POINTED}|[+-]?[0-9]{{1,3}}(,[0-9]+)?",
        "numbers with points between thousands",
        "map_batches with a function that takes the points out and makes the comma a point (docs/recipe.md)",
    ),
    _Notation(
        rf"[^\w\s.+-]?\s*({_GROUPED}|{_POINTED}|[+-]?[0-9]*[.,]?[0-9]+)\s*[^\w\s.]?",
        "numbers beside a sign",
        "map_batches with a function that takes the sign off (docs/recipe.md)",
    ),
)
"""The first that most cells have counts; a number without any mark has several."""


def written_numbers(name: str, texts: pa.Array) -> WrittenNumbers | None:
    """Recognise numbers with a decimal comma, marks between thousands, a sign or too many digits; None for other texts."""
    cells = pc.utf8_trim_whitespace(texts.slice(0, _LOOKED_AT).cast(pa.string()))
    odd = cells.filter(pc.invert(pc.match_substring_regex(cells, r"^[+-]?[0-9]{0,18}(\.[0-9]+)?$")))
    for notation in _NOTATIONS if len(odd) else ():
        if pc.sum(pc.match_substring_regex(odd, f"^({notation.form})$")).as_py() >= len(odd) * _MOSTLY:
            seen = f"its texts look like {notation.seen}, such as {shorten(odd[0].as_py())}"
            return WrittenNumbers(seen, notation.advice.format(name=in_yaml(name)))
    return None
