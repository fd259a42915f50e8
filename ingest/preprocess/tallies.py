"""What is learnt about a column, part by part? Tallies of different rows add up: a task sends home a few numbers.

What they find is written as (center, scale), a fill value or a list of categories, as ray.data.preprocessors find them (a test
compares those of the scalers and encoders); those move every value through the object store, one pass for each column of
categories.
Source of the sums: T. Chan et al., "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DataError
from penstock.ingest.malloc import keep_freed_memory
from penstock.ingest.preprocess.fitted import Category, ColumnState
from penstock.ingest.preprocess.steps import PreprocessStep
from penstock.ingest.ray_tasks import ParallelMap

__all__ = ["MAX_ONE_HOT", "Question", "Unit", "ask"]


_EPSILON = 1e-8
"""A spread up to this is that of a constant column: dividing by it would blow up rounding errors. As in ray.data."""

MAX_ONE_HOT = 10_000
"""A longer one-hot vector is a mistake: 40 KB a row, for what an embedding does with one integer."""


class Question(NamedTuple):
    """What a step wants to know about one column."""

    kind: str
    """The step's kind; `mean` and `most_frequent` for an imputer."""
    column: str
    is_numeric: bool
    """Whether the column is looked at as numbers, in float64, and not as categories."""
    max_categories: int | None = None
    quantiles: tuple[float, float] = (0.25, 0.75)

    @classmethod
    def of(cls, step: PreprocessStep, column: str) -> Question:
        """The question of one fitted step about one of its columns."""
        if step.imputer is not None:
            return cls(step.imputer.strategy, column, step.imputer.strategy == "mean")
        if step.kind in ("one_hot", "ordinal", "label_encoder"):
            return cls(step.kind, column, False, step.one_hot.max_categories if step.one_hot is not None else None)
        quantiles = step.robust_scaler.quantile_range if step.robust_scaler is not None else (0.25, 0.75)
        return cls(step.kind, column, True, None, quantiles)


@dataclass
class Tally:
    """What some rows say about one column. NaN, infinities and nulls are left out."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances from the mean."""
    low: float = np.inf
    high: float = -np.inf
    values: list[np.ndarray] = field(default_factory=list)
    """All of them, where quantiles are asked for: an approximation would differ from run to run."""
    counts: Counter[Category] = field(default_factory=Counter)

    def see(self, question: Question, column: pa.ChunkedArray) -> None:
        """Take in more rows."""
        if not question.is_numeric:
            if pa.types.is_float16(column.type):
                column = column.cast(pa.float32())  # exact; Arrow counts no float16
            if pa.types.is_floating(column.type):
                column = column.filter(pc.is_finite(column))
            found = pc.value_counts(column.drop_null())
            self.counts.update(dict(zip(found.field("values").to_pylist(), found.field("counts").to_pylist(), strict=True)))
            return
        values = _finite(column)
        if len(values):
            low, high = float(values.min()) + 0.0, float(values.max()) + 0.0  # of -0.0 and 0.0 either may come
            values = values.astype(np.float64)
            mean = float(values.mean())
            held = [values.copy()] if question.kind == "robust_scaler" else []
            # Not a dot product: BLAS rounds by the processor and its threads.
            values -= mean
            squares = float(np.square(values, out=values).sum())
            self.add(Tally(len(values), mean, squares, low, high, held))

    def add(self, other: Tally) -> None:
        """Take in what other rows say. The order of additions decides the last bit of a mean."""
        self.counts.update(other.counts)
        if not other.count:
            return
        count, apart = self.count + other.count, other.mean - self.mean
        self.squares += other.squares + apart * apart * self.count * other.count / count
        self.mean += apart * other.count / count
        self.count = count
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.values += other.values


def _finite(column: pa.ChunkedArray) -> np.ndarray:
    """The values that are numbers, in the column's own type, integers with nulls as float64."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.float64(), safe=False)
    values: np.ndarray = column.to_numpy()
    # Whatever is not finite shows in one of the two: quicker than a mask.
    whole = not len(values) or (np.isfinite(values.min()) and np.isfinite(values.max()))
    return values if whole else values[np.isfinite(values)]


class Unit(Protocol):
    """Some of the rows; pickles."""

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows."""


def ask(questions: Sequence[Question], units: Sequence[Unit], parallel: ParallelMap) -> list[ColumnState]:
    """Answer `questions` from the rows of all units, read wherever `parallel` runs.

    The answer depends on the units alone, not on who reads them: their tallies are added in order.

    Raises:
        DataError: a column has no values.
    """
    whole = [Tally() for _ in questions]
    early: dict[int, list[Tally]] = {}
    added = 0
    for number, parts in parallel(functools.partial(_tally, questions), list(enumerate(units))):
        early[number] = parts
        while added in early:
            for tally, part in zip(whole, early.pop(added), strict=True):
                tally.add(part)
            added += 1
    return [_state(question, _facts(question, tally)) for question, tally in zip(questions, whole, strict=True)]


def _tally(questions: Sequence[Question], unit: tuple[int, Unit]) -> tuple[int, list[Tally]]:
    """The unit's number, and a tally of its rows for each question. Runs in a worker."""
    keep_freed_memory()
    number, rows = unit
    tallies = [Tally() for _ in questions]
    for table in rows.tables():
        for question, tally in zip(questions, tallies, strict=True):
            tally.see(question, table.column(question.column))
    return number, tallies


Facts = dict[str, Any]
"""What was found out about a column, by the names that `_state` knows; a value is None where the column has no values."""


def _facts(question: Question, tally: Tally) -> Facts:
    if not question.is_numeric:
        # Of categories that are equally frequent the first in sorted order counts.
        by_count = sorted(tally.counts.items(), key=lambda item: (-item[1], item[0]))
        kept = [value for value, _ in by_count[: question.max_categories]]
        return {"fill": kept[0] if kept else None, "categories": sorted(kept)}
    if not tally.count:
        return {"mean": None, "min": None, "abs_max": None, "median": None}
    facts = {"mean": tally.mean, "std": (tally.squares / tally.count) ** 0.5, "min": tally.low, "max": tally.high}
    facts["abs_max"] = max(abs(tally.low), abs(tally.high))
    if question.kind == "robust_scaler":
        levels = [question.quantiles[0], 0.5, question.quantiles[1]]
        facts |= dict(zip(("low", "median", "high"), np.quantile(np.concatenate(tally.values), levels).tolist(), strict=True))
    return facts


def _state(question: Question, facts: Facts) -> ColumnState:
    """Write facts as what the step applies; a spread of nothing becomes 1, so that a constant column becomes zeros."""
    kind, column = question.kind, question.column
    first = {"standard_scaler": "mean", "min_max_scaler": "min", "max_abs_scaler": "abs_max", "robust_scaler": "median"}
    needed = first.get(kind) or {"mean": "mean", "most_frequent": "fill"}.get(kind, "categories")
    if facts[needed] is None or facts[needed] == []:
        raise DataError(
            f"preprocess: {kind}: column {column!r} has no values in the train split",
            next_step=f"leave the column out (drop: [{column}]), or check the steps before",
        )
    if kind == "one_hot" and len(facts["categories"]) > MAX_ONE_HOT:
        raise DataError(
            f"preprocess: one_hot: column {column!r} has {len(facts['categories']):,} categories; vectors longer than "
            f"{MAX_ONE_HOT:,} are refused",
            next_step=f"use ordinal and an embedding, or keep the most frequent (max_categories: {MAX_ONE_HOT})",
        )
    if kind == "standard_scaler":
        return _scaling(column, facts["mean"], facts["std"], _EPSILON)
    if kind == "min_max_scaler":
        return _scaling(column, facts["min"], facts["max"] - facts["min"], _EPSILON)
    if kind == "max_abs_scaler":
        return _scaling(column, 0.0, facts["abs_max"], 0.0)
    if kind == "robust_scaler":
        return _scaling(column, facts["median"], facts["high"] - facts["low"], 0.0)
    if kind in ("mean", "most_frequent"):
        return ColumnState(column=column, fill=_plain(facts[needed]))
    return ColumnState(column=column, categories=tuple(_plain(value) for value in facts["categories"]))


def _scaling(column: str, center: float, scale: float, least: float) -> ColumnState:
    return ColumnState(column=column, center=float(center), scale=1.0 if scale <= least else float(scale))


def _plain(value: Any) -> Category:
    """A JSON value of the same type, from numpy's or pandas' own."""
    plain: Category = value.item() if isinstance(value, np.generic) else value
    return plain
