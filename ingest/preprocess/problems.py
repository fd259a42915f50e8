"""Which rows cannot be used, how many, and where is the first? Found by batch, joined over all units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.fixed_shape import UnequalLists
from penstock.ingest.files.listing import SourceFile
from penstock.messages import in_yaml

__all__ = ["NAMED_ROWS", "NEVER_DROPPED", "Origin", "Reason", "RowProblem", "SetAside", "joined", "raise_for", "unequal_lists"]

Reason = Literal["null", "empty", "not finite", "unknown category", "label out of range", "broken image"]

NAMED_ROWS = 4
"""Rows that a problem names besides the first."""


class Origin:
    """The source file and row of each row of a table.

    Attributes:
        names: files, by index.
        files: int32 [rows], index into `names`.
        rows: int64 [rows], row number in that file, from 0.
        hashes: uint64 [rows], of each row as it was read; None if rows are not compared.
    """

    def __init__(self, names: tuple[str, ...], files: np.ndarray, rows: np.ndarray, hashes: np.ndarray | None = None) -> None:
        self.names, self.files, self.rows, self.hashes = names, files, rows, hashes

    @classmethod
    def of_file(cls, name: str, first_row: int, num_rows: int) -> Origin:
        """Describe consecutive rows of one file."""
        return cls((name,), np.zeros(num_rows, np.int32), np.arange(first_row, first_row + num_rows, dtype=np.int64))

    @classmethod
    def of_batch(cls, files: tuple[SourceFile, ...], first_row: int, num_rows: int) -> Origin:
        """Describe rows of one file, or one row of each of several (see `penstock.ingest.read.snapshot.RowBatch.files`)."""
        if len(files) == 1:
            return cls.of_file(files[0].uri, first_row, num_rows)
        names = tuple(file.uri for file in files)
        return cls(names, np.arange(num_rows, dtype=np.int32), np.zeros(num_rows, np.int64))

    def take(self, mask: np.ndarray) -> Origin:
        """Select the rows where `mask` is true, or those of an array of indices."""
        return Origin(self.names, self.files[mask], self.rows[mask], None if self.hashes is None else self.hashes[mask])

    def place(self, row: int) -> str:
        """Format the place of a row for a message."""
        return f"{self.names[int(self.files[row])]}, row {int(self.rows[row])} (from 0)"


class SetAside(NamedTuple):
    """Rows that were taken out for one reason, one by one."""

    reason: Reason
    column: str
    origin: Origin
    examples: list[str]
    """The bad value of each row if it helps, else empty."""


class RowProblem(Section):
    """One kind of problem of one column, with the number of rows and the first places."""

    reason: Reason
    column: str
    rows: int
    place: str
    """File and row of the first."""
    others: tuple[str, ...] = ()
    """File and row of a few after it."""
    example: str = ""
    """The bad value of the first row if it helps."""

    @property
    def kind(self) -> str:
        """Reason and column."""
        return f"{self.reason}: {self.column}"

    def __str__(self) -> str:
        some = f"{self.rows:,} rows have" if self.rows != 1 else "1 row has"
        what = {
            "null": f"a null in {self.column}",
            "empty": f"no value in {self.column}, a column without any",
            "not finite": f"NaN or an infinity in {self.column}",
            "unknown category": f"a value in {self.column} that the train split does not have",
            "label out of range": f"a label {self.column} that is not a class index of the train split",
            "broken image": f"an image in {self.column} that cannot be decoded",
        }[self.reason]
        example = f": {self.example}" if self.example else ""
        return f"{some} {what}; first: {self.place}{example}{''.join(f'; {place}' for place in self.others)}"


_ADVICE: dict[Reason, str] = {
    "null": "fill it (numbers by imputer: {columns: [COLUMN]}, text by imputer: {columns: [COLUMN], strategy: most_frequent}, "
    "lists and images at their source), or leave the column out (drop: [COLUMN])",
    "empty": "leave the column out (drop: [COLUMN], or data.columns without it)",
    "not finite": "fill NaN (imputer: {columns: [COLUMN]}), correct infinities and values in lists at their source, or leave "
    "the column out (drop: [COLUMN])",
    "unknown category": "correct the value, or move its rows to the train split",
    "label out of range": "correct the labels; for classes such as -1 and 1, label_encoder: {column: COLUMN}; for regression, "
    "cast: {COLUMN: float32}",
    "broken image": "replace the image there, or leave it out",
}

NEVER_DROPPED: tuple[Reason, ...] = ("label out of range",)
"""Reasons that concern the whole column: without all rows of class -1, one class would be left."""

_LABEL_ADVICE = "correct the labels in the source"


def _advice(problems: Sequence[RowProblem], label: str | None) -> list[str]:
    """Return the advice, once for all columns with the same problem."""
    columns: dict[str, list[str]] = {}
    for problem in problems:
        of_label = problem.column == label and problem.reason in ("null", "not finite")
        columns.setdefault(_LABEL_ADVICE if of_label else _ADVICE[problem.reason], []).append(problem.column)
    return [_for_columns(advice, list(dict.fromkeys(names))) for advice, names in columns.items()]


def _for_columns(advice: str, names: list[str]) -> str:
    """Fill in the names of columns: all of them in lists, otherwise the first."""
    return advice.replace("[COLUMN]", f"[{', '.join(map(in_yaml, names))}]").replace("COLUMN", in_yaml(names[0]))


def joined(problems: Iterable[RowProblem]) -> list[RowProblem]:
    """Add up problems of the same kind and column; the first one in the given order names the place."""
    found: dict[tuple[str, str], RowProblem] = {}
    for problem in problems:
        first = found.get((problem.reason, problem.column))
        if first:
            others = (*first.others, problem.place, *problem.others)[:NAMED_ROWS]
            problem = first.model_copy(update={"rows": first.rows + problem.rows, "others": others})
        found[(problem.reason, problem.column)] = problem
    return list(found.values())


def raise_for(problems: list[RowProblem], *, droppable: bool = True, label: str | None = None) -> None:
    """Raise an error for problems, given in row order; do nothing without problems.

    Args:
        label: the target column, whose missing values must not be filled.
        droppable: whether `data.invalid: drop` would help.

    Raises:
        DataError: with the count, the first file and row of each problem, and the next step.
    """
    problems = joined(problems)
    if not problems:
        return
    advice = _advice(problems, label)[:3]
    droppable = droppable and any(problem.reason not in (*NEVER_DROPPED, "empty") for problem in problems)
    if droppable:
        advice.append("or leave such rows out and count them (data.invalid: drop)")
    lines = [str(problem) for problem in problems]
    lead = "data.invalid: error: " if droppable else ""
    if len(lines) == 1:
        raise DataError(lead + lines[0], next_step="; ".join(advice))
    raise DataError(f"{lead}rows cannot be used for {len(lines)} reasons", problems=lines, next_step="; ".join(advice))


def unequal_lists(name: str, found: UnequalLists, origin: Origin) -> DataError:
    """Make the error for a column whose lists are not all of one length."""
    return DataError(
        f"column {name!r} holds lists of unequal length: {origin.place(found.row)} has {found.length} elements "
        f"and a row before it {found.expected}",
        next_step=f"keep them as they are (ragged: {{columns: [{in_yaml(name)}]}}), cut or pad them in a map_batches function, "
        f"or leave the column out (drop: [{in_yaml(name)}])",
    )
