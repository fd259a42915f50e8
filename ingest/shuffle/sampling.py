"""Which rows does an epoch hold if rows are sampled? Rows in proportion to weights, with as little randomness as possible.

The weights of all rows are put one after the other on a line with as many equidistant marks as the epoch has rows. A row is
drawn once for every mark on its stretch, so that in every epoch its draws differ by less than one from its share. The marks
move from epoch to epoch, so that each row is drawn at some time. A full shuffle maps positions to marks, so that each draw
follows from (seed, epoch, position) alone.

Places are exact integers. Rows of one weight are shuffled on the line, so that patterns in the data do not meet the distance of
the marks.
Source: systematic resampling, as in J. Carpenter et al., "Improved particle filter for nonlinear problems", 1999.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from penstock.config import Section
from penstock.errors import DataError, SpecError
from penstock.ingest.schema import ColumnInfo
from penstock.ingest.shuffle.permutation import Permutation
from penstock.ingest.spec import SampleSpec
from penstock.ingest.splitmix import GOLDEN, hash_words
from penstock.messages import counted

__all__ = ["MAX_ROWS", "Draws", "Mixture", "check_column", "make_draws", "mixed_draws"]

Ids = NDArray[np.int64]

MAX_ROWS = 1 << 30
"""Limit for the split and an epoch: the arithmetic has 64 bits, and draws by weights keep 40 bytes per row."""

_LINE_BITS = 58

_LAYOUT, _MARKS = 1 << 40, 2 << 40  # purpose of a permutation, part of its key; above all epochs and numbers of sources


class Mixture(Section):
    """Rows of several datasets, numbered through; each dataset gets a share of the draws whatever its size."""

    sources: Annotated[
        tuple[tuple[PositiveInt, Annotated[float, Field(gt=0.0, allow_inf_nan=False)]], ...], Field(min_length=1)
    ]
    """(rows, share) of each dataset; only the proportions of shares count."""
    rows: PositiveInt | None = None
    """Rows of an epoch; None takes the sum of all."""


class _Line(NamedTuple):
    """Stretches of rows of one weight each, side by side."""

    first: Ids
    """Index of each stretch's first row, counted along the line."""
    begins: Ids
    """Begin of each stretch on the line."""
    ends: Ids
    """End of each stretch."""
    width: Ids
    """Length of one row of the stretch."""

    @classmethod
    def of(cls, counts: Ids, width: Ids) -> _Line:
        """Make the line of stretches of `counts` rows."""
        ends = np.cumsum(counts * width)
        return cls(np.cumsum(counts) - counts, ends - counts * width, ends, width)


class Draws:
    """The draws of every epoch.

    Args:
        rows: row ids along the line.
        line: their weights.
        seed: of the order.
        epoch_rows: draws in an epoch.
        ramp: (share, epochs): only this share of `rows` is drawn in epoch 0, and all of them from epoch `epochs` on.
    """

    def __init__(self, rows: Ids, line: _Line, seed: int, epoch_rows: int, ramp: tuple[float, int] | None = None) -> None:
        self._rows, self._line, self._seed, self._epoch_rows, self._ramp = rows, line, seed, epoch_rows, ramp

    def ids_at(self, epoch: int, positions: Ids) -> Ids:
        """Return row ids drawn at `positions` (each in [0, epoch_rows)) of an epoch: int64, shape (n,) to (n,)."""
        length, marks = self._length(epoch), self._epoch_rows
        mark = _marks(marks, self._seed, epoch)(positions)
        # Multiples of the golden ratio keep the marks of all epochs far apart.
        moved = (length * (((epoch + 1) * GOLDEN) >> 32 & 0xFFFFFFFF)) >> 32
        at = mark * (length // marks) + (mark * (length % marks) + moved) // marks
        stretch = np.searchsorted(self._line.ends, at, side="right")
        inside = (at - self._line.begins[stretch]) // self._line.width[stretch]
        return self._rows[self._line.first[stretch] + inside]

    def _length(self, epoch: int) -> int:
        whole = int(self._line.ends[-1])
        if self._ramp is None:
            return whole
        share, epochs = self._ramp
        share += (1 - share) * min(1.0, epoch / epochs)
        rows = max(1, round(share * len(self._rows)))
        return rows * int(self._line.width[0])


@functools.lru_cache(maxsize=4)
def _marks(count: int, seed: int, epoch: int) -> Permutation:
    return Permutation(count, hash_words(seed, epoch, _MARKS))


def mixed_draws(mixture: Mixture, seed: int) -> Draws:
    """Make the draws of a mixture. Rows are numbered through the sources.

    Raises:
        SpecError: there are more rows than `MAX_ROWS`.
    """
    counts = np.array([rows for rows, _ in mixture.sources], np.int64)
    shares = np.array([share for _, share in mixture.sources])
    epoch_rows = mixture.rows or int(counts.sum())
    _check_rows(max(int(counts.sum()), epoch_rows))
    starts = (np.cumsum(counts) - counts).tolist()
    parts = [
        Permutation(rows, hash_words(seed, _LAYOUT, number))(np.arange(rows)) + start
        for number, (rows, start) in enumerate(zip(counts.tolist(), starts, strict=True))
    ]
    return Draws(np.concatenate(parts), _Line.of(counts, _width(shares, counts)), seed, epoch_rows)


def check_column(sample: SampleSpec, columns: Sequence[ColumnInfo]) -> None:
    """Raise SpecError unless `columns`, which are prepared and read, hold a suitable column."""
    found = next((column for column in columns if column.name == sample.column), None)
    if found is None:
        raise SpecError(
            f"shuffle.sample: there is no column {sample.column!r}",
            problems=[f"columns: {', '.join(column.name for column in columns)}"],
            next_step="name one of these, or keep it out of transforms that join columns, such as concatenator (in a program, "
            "open_feed's `columns` must have it, too)",
        )
    if found.shape or found.varies:
        raise SpecError(
            f"shuffle.sample: column {found.name!r} is {found.type_text}: several values per row, not one",
            next_step="name a column of single values",
        )
    if sample.balance is not None and np.dtype(found.dtype).kind not in "iu":
        raise SpecError(
            f"shuffle.sample.balance: column {found.name!r} holds {found.dtype}, and classes are integers",
            next_step="name a column that the transform label_encoder or ordinal has prepared",
        )


def make_draws(sample: SampleSpec, seed: int, values: NDArray[np.generic]) -> Draws:
    """Make the draws of a `shuffle.sample` section.

    Args:
        seed: of the order.
        values: [rows], the column that the section names, in row order.

    Raises:
        SpecError: there are more rows than `MAX_ROWS`.
        DataError: weights are negative or not finite, or all 0; the first such row is named.
    """
    count = len(values)
    epoch_rows = sample.rows or count
    _check_rows(max(count, epoch_rows))
    shuffled = Permutation(count, hash_words(seed, _LAYOUT))(np.arange(count))
    if sample.weights is not None:
        return Draws(shuffled, _weighted(sample.column, values, shuffled), seed, epoch_rows)
    order = shuffled[np.argsort(values[shuffled], kind="stable")]
    if sample.easiest_first is not None:
        line = _Line.of(np.array([count], np.int64), np.ones(1, np.int64))
        return Draws(order, line, seed, epoch_rows, (sample.start, sample.over_epochs))
    return Draws(order, _balanced(sample, values), seed, epoch_rows)


def _check_rows(rows: int) -> None:
    if not 0 < rows <= MAX_ROWS:
        raise SpecError(f"shuffle.sample: the split or epoch has {counted(rows, 'row')}; sampling needs 1 to {MAX_ROWS:,}")


def _width(shares: NDArray[np.float64], counts: Ids) -> Ids:
    """Compute the length of one row on the line, if stretches of `counts` rows get these shares of it."""
    return np.maximum(1, (shares / shares.sum() / counts * 2.0**_LINE_BITS).astype(np.int64))


def _balanced(sample: SampleSpec, values: NDArray[np.generic]) -> _Line:
    """Make a stretch for each class; a row gets the share of its class, divided by the rows of the class."""
    _, counts = np.unique(values, return_counts=True)
    shares = counts.astype(np.float64) ** (1 - sample.power)
    return _Line.of(counts.astype(np.int64), _width(shares, counts))


def _weighted(column: str, values: NDArray[np.generic], shuffled: Ids) -> _Line:
    """Make a stretch for each row."""
    weights = values.astype(np.float64)
    wrong = np.flatnonzero(~np.isfinite(weights) | (weights < 0))
    if len(wrong):
        raise DataError(
            f"shuffle.sample.weights: {len(wrong):,} rows of column {column!r} are negative or not finite; the first is row "
            f"{wrong[0]:,} of the split (from 0): {weights[wrong[0]]}"
        )
    if not weights.any():
        raise DataError(f"shuffle.sample.weights: column {column!r} is 0 in every row, so no row can be drawn")
    shares = weights / weights.max()
    # fsum: the last bit of another sum depends on the processor, and would change places on the line.
    width = np.rint(shares / math.fsum(shares) * 2.0**_LINE_BITS).astype(np.int64)[shuffled]
    return _Line.of(np.ones(len(width), np.int64), width)
