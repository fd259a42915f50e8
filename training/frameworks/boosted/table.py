"""How do the columns of a rank's rows become a matrix of named features?"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import SpecError
from penstock.ingest.feed.cursor import Feed
from penstock.ingest.schema import FeedSchema

__all__ = ["FeatureTable", "Floats", "ShardTable", "Task"]

Floats = NDArray[np.float32]

_NOT_IN_NAMES = re.compile(r"[\[\]<>{}\":,\s]")
"""Characters that one of the libraries refuses in a feature's name."""


class FeatureTable:
    """The matrix behind a dataset's columns: float32 [rows, features], a column of k numbers as k features.

    Raises:
        SpecError: a column's rows differ in length, or there is no feature, or not one label.
    """

    def __init__(self, schema: FeedSchema) -> None:
        ragged = [column.name for column in schema.features if column.ragged is not None]
        if ragged:
            raise SpecError(
                f"trees need rows of one length, and the rows of {', '.join(ragged)} differ",
                next_step="drop the column in `preprocess`, or make numbers of it with map_batches",
            )
        if schema.label is None or not schema.features:
            raise SpecError("trees learn a label from features; the data has none", next_step="set data.label")
        if schema[schema.label].shape or schema[schema.label].ragged:
            raise SpecError(
                f"trees learn one label; a row of {schema.label!r} holds {schema[schema.label].type_text}",
                next_step="name a column of one class or one number in data.label",
            )
        self.schema, self.label = schema, schema.label

    @cached_property
    def names(self) -> list[str]:
        """Names of the features: the column's, with a number if it holds several."""
        found: list[str] = []
        for column in self.schema.features:
            size = math.prod(column.shape)
            name = _NOT_IN_NAMES.sub("_", column.name)
            found += [name] if not column.shape else [f"{name}_{place}" for place in range(size)]
        return found if len(set(found)) == len(found) else [f"f{number}_{name}" for number, name in enumerate(found)]

    def matrix(self, batch: Mapping[str, Tensor]) -> Floats:
        """Build the matrix of a batch on the CPU, [rows, features]. Shares memory with a single column of float32."""
        parts = [batch[column.name].numpy() for column in self.schema.features]
        parts = [part.reshape(len(part), -1) for part in parts]
        if len(parts) == 1:
            return np.ascontiguousarray(parts[0], np.float32)
        matrix = np.empty((len(parts[0]), len(self.names)), np.float32)
        np.concatenate(parts, axis=1, out=matrix, casting="unsafe")
        return matrix

    def labels(self, batch: Mapping[str, Tensor]) -> Floats:
        """Return the label of a batch, [rows]: the class's index, or the number."""
        return batch[self.label].numpy().reshape(-1).astype(np.float32)

    def by_column(self, gains: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
        """Sum the gains of the features of each column; shares of 1, the largest first."""
        total, first, shares = float(np.sum(gains)), 0, dict[str, float]()
        for column in self.schema.features:
            size = math.prod(column.shape)
            shares[column.name] = float(np.sum(gains[first : first + size])) / total if total else 0.0
            first += size
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Task:
    """The data and the parameters of a training.

    Attributes:
        schema: of the rows.
        params: the user's, by the library's names.
        seed: of all random draws.
        threads: of one rank.
    """

    schema: FeedSchema
    params: Mapping[str, Any]
    seed: int
    threads: int

    @cached_property
    def table(self) -> FeatureTable:
        """The matrix behind the columns."""
        return FeatureTable(self.schema)


class ShardTable:
    """One rank's rows of a split, batch by batch; every pass reads them again.

    Args:
        table: how columns become features.
        feed: with batches on the CPU.
    """

    def __init__(self, table: FeatureTable, feed: Feed) -> None:
        self._table, self._feed, self.names = table, feed, table.names

    @cached_property
    def labels(self) -> Floats:
        """Labels of all rows."""
        return np.concatenate([labels for _, labels in self.batches()])

    def batches(self) -> Iterator[tuple[Floats, Floats]]:
        """Yield (features [rows, features], labels [rows]) of every batch that has rows."""
        for batch in self._feed.batches(0):
            if batch.rows:
                yield self._table.matrix(batch.columns), self._table.labels(batch.columns)
