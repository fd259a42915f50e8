"""What can a transform learn about a column of the train split? Its question, the facts found, and the state it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.config import Section

__all__ = ["Category", "ColumnFacts", "ColumnState", "Question"]

Category = str | bool | int | float


class Question(NamedTuple):
    """A question about one column. Nulls, NaN and infinities are left out of every answer."""

    column: str
    about: Literal["numbers", "categories"]
    """`numbers`: statistics in float64; `categories`: counts of strings, numbers or booleans."""
    quantiles: tuple[float, ...] = ()
    """Levels from 0 to 1; any level holds all values of the column in memory."""
    max_categories: int | None = None
    """Find only that many categories, the most frequent."""


@dataclass(frozen=True)
class ColumnFacts:
    """The answer, of at least one value: the fields of `numbers` or those of `categories` are set."""

    mean: float = 0.0
    std: float = 0.0
    """Of the whole split: the squared distances are divided by the number of values."""
    low: float = 0.0
    high: float = 0.0
    quantiles: tuple[float, ...] = ()
    """In the order of the question."""
    categories: tuple[Category, ...] = ()
    """Sorted."""
    most_frequent: Category | None = None
    """Of equally frequent ones the first in sorted order."""


class ColumnState(Section):
    """The state of a transform for one column; which fields are set depends on the transform. Exact to the bit in JSON."""

    column: str
    center: float | None = None
    """Scalers: the value is (x - center) / scale."""
    scale: float | None = None
    fill: Category | None = None
    """Imputer: replaces a missing value."""
    categories: tuple[Category, ...] | None = None
    """Encoders: the categories, their position being their code."""
    more: dict[str, Category] | None = None
    """Other values of a transform, by names of its own."""
