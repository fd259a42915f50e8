"""What was in the rows that were prepared? Rows and classes by file, and every source column in a few numbers, by split.

It is measured beside the preparation, as the rows pass; parts of different rows add up. It decides nothing: two runs are
compared by it. Images and long texts are not looked into.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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

__all__ = ["ColumnProfile", "FileProfile", "Profile", "Profiler", "merged"]

MAX_FILES = 10_000
"""Sources of more files than that (images) are described without them."""

MAX_VALUES = 64
"""A column of text with more values than that is no category: its values are not counted."""

LIST_VALUES = 1 << 16
"""Of columns of lists, about so many entries of each batch are looked at."""


class ColumnProfile(Section):
    """One column of the source in one split."""

    rows: int = 0
    nulls: int = 0
    count: int = 0
    """Numbers that `mean` and the like are of; 0 where the column is text."""
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances from the mean."""
    low: float = 0.0
    high: float = 0.0
    values: dict[str, int] | None = None
    """Rows of each value of a column of text; None of numbers, and where there are too many values."""

    @property
    def std(self) -> float:
        """Of all rows."""
        return float((self.squares / self.count) ** 0.5) if self.count else 0.0

    def plus(self, other: ColumnProfile) -> ColumnProfile:
        """Both together."""
        seen = self._seen()
        seen.add(other._seen())
        return seen.profile()

    def _seen(self) -> _Seen:
        tally = Tally(self.count, self.mean, self.squares, *((self.low, self.high) if self.count else (np.inf, -np.inf)))
        return _Seen(self.rows, self.nulls, tally, None if self.values is None else Counter(self.values))


@dataclass
class _Seen:
    """A `ColumnProfile` in the making: of a model for every batch and column more time goes into pydantic than into sums."""

    rows: int = 0
    nulls: int = 0
    tally: Tally = field(default_factory=Tally)
    values: Counter[str] | None = None

    def add(self, other: _Seen) -> None:
        """Take in other rows."""
        counted = (self.values is not None or not self.rows) and (other.values is not None or not other.rows)
        values = (self.values or Counter()) + (other.values or Counter()) if counted else None
        self.values = values if values is not None and len(values) <= MAX_VALUES else None
        self.rows += other.rows
        self.nulls += other.nulls
        self.tally.add(other.tally)

    def profile(self) -> ColumnProfile:
        """What was seen."""
        tally = self.tally
        low, high = (tally.low, tally.high) if tally.count else (0.0, 0.0)
        return ColumnProfile(
            rows=self.rows,
            nulls=self.nulls,
            count=tally.count,
            mean=tally.mean,
            squares=tally.squares,
            low=low,
            high=high,
            values=None if self.values is None else dict(self.values),
        )


class FileProfile(Section):
    """What one source file gave."""

    location: Split
    name: str
    rows: dict[Split, int] = Field(default_factory=dict)
    """Rows that were left to use, by split."""
    classes: dict[str, int] = Field(default_factory=dict)
    """Rows of each class in all splits, where the label is one."""

    def plus(self, other: FileProfile) -> FileProfile:
        """Of other rows of the same file, too."""
        classes = Counter(self.classes) + Counter(other.classes)
        return self.model_copy(
            update={
                "rows": dict(Counter(self.rows) + Counter(other.rows)),
                "classes": {label: classes[label] for label in sorted(classes, key=int)},
            }
        )


class Profile(Section):
    """What the rows of a dataset, or of a part of it, were."""

    version: int = 1
    files: tuple[FileProfile, ...] = ()
    """Empty where there are too many."""
    columns: dict[Split, dict[str, ColumnProfile]] = Field(default_factory=dict)


class Profiler:
    """Looks at the rows of some files as they pass.

    Args:
        files: URI -> (location, name) of each file.
    """

    def __init__(self, files: Mapping[str, tuple[Split, str]]) -> None:
        self._places = files if len(files) <= MAX_FILES else {}
        self._rows: dict[str, Counter[Split]] = {}
        self._classes: dict[str, Counter[int]] = {}
        self._columns: dict[Split, dict[str, _Seen]] = {}

    def read(self, split: Split, table: pa.Table) -> None:
        """Look at rows as they were read."""
        columns = self._columns.setdefault(split, {})
        for name in table.column_names:
            found = _look_at(table.column(name))
            if found is not None:
                columns.setdefault(name, _Seen()).add(found)

    def prepared(self, split: Split, origin: Origin, labels: np.ndarray | None) -> None:
        """Count rows that are ready, with their classes where the label is one: int64 [rows]."""
        if not self._places:
            return
        if len(origin.names) == 1:
            self._rows.setdefault(origin.names[0], Counter())[split] += len(origin.files)
            if labels is not None:
                counts = np.bincount(labels)  # they are from 0 to MAX_CLASSES; sorting takes ten times as long
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
        """What was seen."""
        files = [
            FileProfile(
                location=location,
                name=name,
                rows=dict(self._rows.get(uri, {})),
                classes={str(label): rows for label, rows in sorted(self._classes.get(uri, {}).items())},
            )
            for uri, (location, name) in self._places.items()
        ]
        columns = {
            split: {name: seen.profile() for name, seen in of_split.items()} for split, of_split in self._columns.items()
        }
        return Profile(files=tuple(files), columns=columns)


def merged(parts: Iterable[Profile]) -> Profile:
    """The profile of the rows of all parts."""
    files: dict[tuple[Split, str], FileProfile] = {}
    columns: dict[Split, dict[str, ColumnProfile]] = {}
    for part in parts:
        for file in part.files:
            before = files.get((file.location, file.name))
            files[file.location, file.name] = file if before is None else before.plus(file)
        for split, found in part.columns.items():
            whole = columns.setdefault(split, {})
            for name, column in found.items():
                whole[name] = whole.get(name, ColumnProfile()).plus(column)
    return Profile(files=tuple(files.values()) if len(files) <= MAX_FILES else (), columns=columns)


def _look_at(column: pa.ChunkedArray) -> _Seen | None:
    """None of a column that is not looked into."""
    kind, rows, nulls = column.type, len(column), column.null_count
    if pa.types.is_fixed_size_list(kind) and is_number(kind.value_type):
        every = max(1, len(column) * kind.list_size // LIST_VALUES)
        column = pa.chunked_array([pc.list_flatten(column.take(pa.array(np.arange(0, len(column), every))))])
        kind = column.type
    if is_number(kind) or pa.types.is_boolean(kind):
        return _Seen(rows, nulls, Tally.of(Question("", "numbers"), column))
    if is_text(kind):
        counts = pc.value_counts(column.drop_null())
        pairs = zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True)
        return _Seen(rows, nulls, values=Counter(dict(pairs)) if len(counts) <= MAX_VALUES else None)
    return None
