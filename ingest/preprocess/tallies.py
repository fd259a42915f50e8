"""What is learnt about a column, part by part? Tallies of different rows add up, so that a task returns a few numbers.

They find what ray.data.preprocessors find (a test compares those of the scalers and encoders); those move every value through
the object store, one pass for each column of categories.
Source of the sums: T. Chan et al., "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DataError
from penstock.ingest.preprocess.learnt import Category, ColumnFacts, Question
from penstock.ingest.ray_tasks import ParallelMap

__all__ = ["GivesRows", "Tally", "ask"]


@dataclass
class Tally:
    """Sums and counts of some rows of one column. NaN, infinities and nulls are left out."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances from the mean."""
    low: float = np.inf
    high: float = -np.inf
    values: list[np.ndarray] = field(default_factory=list)
    """All values if quantiles are needed: an approximation would differ from run to run."""
    counts: Counter[Category] = field(default_factory=Counter)

    @classmethod
    def of(cls, question: Question, column: pa.ChunkedArray) -> Tally:
        """Make the tally of these rows."""
        if question.about == "categories":
            if pa.types.is_nested(column.type):
                column = pc.list_flatten(column)
            if pa.types.is_float16(column.type):
                column = column.cast(pa.float32())  # exact; Arrow counts no float16
            if pa.types.is_floating(column.type):
                column = column.filter(pc.is_finite(column))
            found = pc.value_counts(column.drop_null())
            pairs = zip(found.field("values").to_pylist(), found.field("counts").to_pylist(), strict=True)
            return cls(counts=Counter(dict(pairs)))
        values, low, high = _finite(column)
        if not len(values):
            return cls()
        values = values.astype(np.float64)
        mean = float(values.mean())
        held = [values.copy()] if question.quantiles else []
        # Not a dot product: BLAS rounds by the processor and its threads.
        values -= mean
        squares = float(np.square(values, out=values).sum())
        return cls(len(values), mean, squares, low, high, held)

    def add(self, other: Tally) -> None:
        """Add the tally of other rows. The order of additions decides the last bit of a mean."""
        self.counts.update(other.counts)
        if not other.count:
            return
        count, distance = self.count + other.count, other.mean - self.mean
        self.squares += other.squares + distance * distance * self.count * other.count / count
        self.mean += distance * other.count / count
        self.count = count
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.values += other.values


def _finite(column: pa.ChunkedArray) -> tuple[np.ndarray, float, float]:
    """Return the finite values in the column's own type (integers with nulls as float64), the least and the largest."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.float64(), safe=False)
    values: np.ndarray = column.to_numpy()
    low, high = _range(values)
    # A value that is not finite is one of the two: quicker to see than by a mask.
    if not (np.isfinite(low) and np.isfinite(high)):
        values = values[np.isfinite(values)]
        low, high = _range(values)
    return values, low, high


def _range(values: np.ndarray) -> tuple[float, float]:
    if not len(values):
        return 0.0, 0.0
    return float(values.min()) + 0.0, float(values.max()) + 0.0  # -0.0 becomes 0.0: min and max may return either


class GivesRows(Protocol):
    """Some of the rows. Picklable."""

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows."""


def ask(questions: Sequence[Question], units: Sequence[Sequence[GivesRows]], parallel: ParallelMap) -> list[ColumnFacts | None]:
    """Answer `questions` from the rows of all units, each of one part or more, read wherever `parallel` runs.

    The answer depends on the units alone, not on their parts or on where they are read: tallies are added in the order of the
    rows, first those of a unit's batches, then those of the units. It is None for a column without values.
    """
    whole = [Tally() for _ in questions]
    of_unit = [Tally() for _ in questions]
    parts = [(part, place == len(unit) - 1, len(unit) > 1) for unit in units for place, part in enumerate(unit)]
    asked = [(number, part, in_parts) for number, (part, _, in_parts) in enumerate(parts)]
    early: dict[int, list[list[Tally]]] = {}
    added = 0
    for number, batches in parallel(functools.partial(_tally, questions), asked):
        early[number] = batches
        while added in early:
            _, is_last, in_parts = parts[added]
            for tallies in early.pop(added):
                _add(of_unit if in_parts else whole, tallies)
            if in_parts and is_last:
                _add(whole, of_unit)
                of_unit = [Tally() for _ in questions]
            added += 1
    return [_facts(question, tally) for question, tally in zip(questions, whole, strict=True)]


def _add(tallies: Sequence[Tally], others: Sequence[Tally]) -> None:
    for tally, other in zip(tallies, others, strict=True):
        tally.add(other)


def _tally(questions: Sequence[Question], unit: tuple[int, GivesRows, bool]) -> tuple[int, list[list[Tally]]]:
    """Return the number and a tally for each question, of all rows or of each batch of a unit's part. Runs in a worker."""
    number, rows, in_parts = unit
    if in_parts:  # adding rounds, so the driver adds them to those of the batches before
        return number, [
            [Tally.of(question, table.column(question.column)) for question in questions] for table in rows.tables()
        ]
    whole = [Tally() for _ in questions]
    for table in rows.tables():
        for question, tally in zip(questions, whole, strict=True):
            tally.add(Tally.of(question, table.column(question.column)))
    return number, [whole]


def _facts(question: Question, tally: Tally) -> ColumnFacts | None:
    if question.about == "categories":
        # Among equally frequent categories the first in sorted order wins.
        by_count = sorted(tally.counts.items(), key=lambda item: (-item[1], item[0]))
        kept = [_plain(value) for value, _ in by_count[: question.max_categories]]
        _refuse_two_forms(question.column, kept)
        return ColumnFacts(categories=tuple(sorted(kept)), most_frequent=kept[0]) if kept else None
    if not tally.count:
        return None
    levels = list(question.quantiles)
    quantiles = np.quantile(np.concatenate(tally.values), levels).tolist() if levels else []
    std = (tally.squares / tally.count) ** 0.5
    return ColumnFacts(mean=tally.mean, std=std, low=tally.low, high=tally.high, quantiles=tuple(quantiles))


def _refuse_two_forms(column: str, categories: Sequence[Category]) -> None:
    """Refuse categories that differ in nothing but their Unicode form: they look alike, and would be two."""
    seen: dict[str, Category] = {}
    for value in categories:
        first = seen.setdefault(normalize("NFC", value), value) if isinstance(value, str) else value
        if first != value:
            raise DataError(
                f"column {column!r} holds {value!r} in two Unicode forms: {first!a} and {value!a}",
                next_step="write it in one form in the source: unicodedata.normalize('NFC', text)",
            )


def _plain(value: Category | np.generic) -> Category:
    """Convert a value of numpy or pandas to a JSON value of the same type."""
    plain: Category = value.item() if isinstance(value, np.generic) else value
    return plain
