"""Which rows of a file hold a value that does not read as its column's type, if they are to be marked rather than refused?

A reader that can mark them gives, where its schema asks for the column `UNREADABLE`, null for such a value, and in that column
the first of the row's columns that has one, with what it holds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.ingest.columns.type_text import value_text

__all__ = ["UNREADABLE", "UNREADABLE_FIELD", "Unreadable", "cast_readable"]


UNREADABLE = "_unreadable"

UNREADABLE_FIELD = pa.field(UNREADABLE, pa.struct([("column", pa.string()), ("example", pa.string())]))
"""Null for a row that reads."""


class Unreadable:
    """Collects the marks of some consecutive rows, column by column."""

    def __init__(self, rows: int) -> None:
        self._marks: list[dict[str, str] | None] = [None] * rows

    def cast(self, name: str, values: pa.Array, kind: pa.DataType, cast: Callable[[pa.Array], pa.Array]) -> pa.Array:
        """Cast one column; its values that do not read become null and are marked.

        Raises:
            pyarrow.ArrowNotImplementedError: there is no such conversion, whatever the values are.
        """
        readable, bad = cast_readable(values, cast)
        for row in np.flatnonzero(bad).tolist():
            held = value_text(values, row)
            self._marks[row] = self._marks[row] or {"column": name, "example": f"{held} does not read as {kind}"}
        return readable

    def array(self) -> pa.Array:
        """Return the marks: `UNREADABLE_FIELD` [rows]."""
        return pa.array(self._marks, UNREADABLE_FIELD.type)


def cast_readable(values: pa.Array, cast: Callable[[pa.Array], pa.Array]) -> tuple[pa.Array, np.ndarray]:
    """Cast what can be cast: the values, null where one cannot, and which those are, bool [rows]. Found by halving.

    Raises:
        pyarrow.ArrowNotImplementedError: there is no such conversion, whatever the values are.
    """
    bad = np.zeros(len(values), np.bool_)
    try:
        return cast(values), bad
    except pa.ArrowInvalid:
        pass
    spans = [(0, len(values))]
    while spans:
        start, stop = spans.pop()
        try:
            cast(values.slice(start, stop - start))
        except pa.ArrowInvalid:
            middle = (start + stop) // 2
            if stop - start == 1:
                bad[start] = True
            else:
                spans += [(start, middle), (middle, stop)]
    return cast(pc.if_else(pa.array(bad), pa.scalar(None, values.type), values)), bad
