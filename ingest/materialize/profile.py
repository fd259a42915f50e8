"""What do the prepared rows contain? Rows and classes by file, and statistics of every source column, by split.

Profiles are measured while rows are prepared, and profiles of different rows add up. Two runs are compared by them. Images and
long texts have no statistics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from penstock.config import Section
from penstock.ingest.columns.fixed_shape import is_number, is_text
from penstock.ingest.preprocess.learnt import Question
from penstock.ingest.preprocess.problems import Origin
from penstock.ingest.preprocess.tallies import Tally
from penstock.ingest.schema import Split

__all__ = ["MAX_FILES", "ColumnProfile", "FileProfile", "Profile", "Profiler", "merged"]

MAX_FILES = 10_000
"""A profile of more files (images) does not list them."""

MAX_VALUES = 64
"""A column of text with more values is not a category: its values are not counted."""

LIST_VALUES = 1 << 16
"""About the entries of each batch that are sampled from a column of lists."""


@dataclass
class ColumnProfile:
    """One column of the source in one split. A dataclass: a pydantic model for every batch would cost more than the sums."""

    rows: int = 0
    nulls: int = 0
    count: int = 0
    """Count of the numbers that `mean` and the rest describe; 0 if the column is text."""
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances from the mean."""
    low: float = 0.0
    high: float = 0.0
    values: dict[str, int] | None = None
    """Rows of each value of a column of text; None for numbers, and if there are too many values."""

    @property
    def std(self) -> float:
        """Standard deviation over all rows."""
        return float((self.squares / self.count) ** 0.5) if self.count else 0.0

    def add(self, other: ColumnProfile) -> None:
        """Add the rows of `other`."""
        if (self.values is None and self.rows) or (other.values is None and other.rows):
            self.values = None
        else:
            values = Counter(self.values or {}) + Counter(other.values or {})
            self.values = dict(values) if len(values) <= MAX_VALUES else None
        self.rows += other.rows
        self.nulls += other.nulls
        if other.count:
            tally = self._tally()
            tally.add(other._tally())
            self._set(tally)

    def _tally(self) -> Tally:
        return Tally(self.count, self.mean, self.squares, self.low, self.high) if self.count else Tally()

    def _set(self, tally: Tally) -> None:
        self.count, self.mean, self.squares, self.low, self.high = tally.count, tally.mean, tally.squares, tally.low, tally.high


class FileProfile(Section):
    """Rows and classes of one source file."""

    location: Split
    name: str
    rows: dict[Split, int] = Field(default_factory=dict)
    """Prepared rows, by split."""
    classes: dict[str, int] = Field(default_factory=dict)
    """Rows of each class in all splits, if the label is a class."""

    def plus(self, other: FileProfile) -> FileProfile:
        """Return the sum with other rows of the same file."""
        classes = Counter(self.classes) + Counter(other.classes)
        return self.model_copy(
            update={
                "rows": dict(Counter(self.rows) + Counter(other.rows)),
                "classes": {label: classes[label] for label in sorted(classes, key=int)},
            }
        )


class Profile(Section):
    """Files and columns of the rows of a dataset, or of a part of it."""

    version: int = 1
    files: tuple[FileProfile, ...] = ()
    """Empty if there are too many."""
    columns: dict[Split, dict[str, ColumnProfile]] = Field(default_factory=dict)


class Profiler:
    """Measures the rows of some files while they are prepared.

    Args:
        files: URI -> (location, name) of each file.
    """

    def __init__(self, files: Mapping[str, tuple[Split, str]]) -> None:
        self._places = files if len(files) <= MAX_FILES else {}
        self._rows: dict[str, Counter[Split]] = {}
        self._classes: dict[str, Counter[int]] = {}
        self._columns: dict[Split, dict[str, ColumnProfile]] = {}

    def read(self, split: Split, table: pa.Table) -> None:
        """Add source rows."""
        columns = self._columns.setdefault(split, {})
        for name in table.column_names:
            found = _profile(table.column(name))
            if found is not None:
                columns.setdefault(name, ColumnProfile()).add(found)

    def prepared(self, split: Split, origin: Origin, labels: np.ndarray | None) -> None:
        """Count prepared rows, and their classes if the label is a class: int64 [rows]."""
        if not self._places:
            return
        if len(origin.names) == 1:
            self._rows.setdefault(origin.names[0], Counter())[split] += len(origin.files)
            if labels is not None:
                counts = np.bincount(labels)  # labels are below MAX_CLASSES; sorting takes ten times as long
                found = np.flatnonzero(counts)
                classes = self._classes.setdefault(origin.names[0], Counter())
                classes.update(dict(zip(found.tolist(), counts[found].tolist(), strict=True)))
            return
        for row, index in enumerate(origin.files.tolist()):  # one row of each of many files
            name = origin.names[index]
            self._rows.setdefault(name, Counter())[split] += 1
            if labels is not None:
                self._classes.setdefault(name, Counter())[int(labels[row])] += 1

    def profile(self) -> Profile:
        """Return the profile of all rows so far."""
        files = [
            FileProfile(
                location=location,
                name=name,
                rows=dict(self._rows.get(uri, {})),
                classes={str(label): rows for label, rows in sorted(self._classes.get(uri, {}).items())},
            )
            for uri, (location, name) in self._places.items()
        ]
        return Profile(files=tuple(files), columns=self._columns)


def merged(parts: Iterable[Profile]) -> Profile:
    """Return the profile of the rows of all parts."""
    files: dict[tuple[Split, str], FileProfile] = {}
    columns: dict[Split, dict[str, ColumnProfile]] = {}
    for part in parts:
        for file in part.files:
            before = files.get((file.location, file.name))
            files[file.location, file.name] = file if before is None else before.plus(file)
        for split, found in part.columns.items():
            whole = columns.setdefault(split, {})
            for name, column in found.items():
                whole.setdefault(name, ColumnProfile()).add(column)
    return Profile(files=tuple(files.values()) if len(files) <= MAX_FILES else (), columns=columns)


def _profile(column: pa.ChunkedArray) -> ColumnProfile | None:
    """Return None for a column without statistics."""
    kind, rows, nulls = column.type, len(column), column.null_count
    if pa.types.is_fixed_size_list(kind) and is_number(kind.value_type):
        picked = np.arange(0, rows, max(1, rows * kind.list_size // LIST_VALUES))
        column = pc.list_flatten(column if len(picked) == rows else column.take(pa.array(picked)))
        if (every := len(column) // LIST_VALUES) > 1:  # rows that are longer than that
            column = column.take(pa.array(np.arange(0, len(column), every)))
        kind = column.type
    if is_number(kind) or pa.types.is_boolean(kind):
        found, tally = ColumnProfile(rows, nulls), Tally.of(Question("", "numbers"), column)
        if tally.count:
            found._set(tally)
        return found
    if is_text(kind):
        counts = pc.value_counts(column.drop_null())
        pairs = zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True)
        return ColumnProfile(rows, nulls, values=dict(pairs) if len(counts) <= MAX_VALUES else None)
    return None
