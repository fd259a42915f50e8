"""How do prepared columns, as arrays or a DataFrame, become the batches that a model takes?

A column of lists of unequal length is given as an array [rows, longest] and `<name>_length`, int64 [rows].
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from penstock.errors import DataError
from penstock.ingest.feed.lists import from_padded
from penstock.ingest.schema import ColumnInfo, FeedSchema
from penstock.messages import capped

__all__ = ["PreparedColumns"]


class PreparedColumns:
    """Feature columns as the dataset's feed holds them, rows first.

    Args:
        given: a mapping of name to array, or a DataFrame whose cells are scalars or (flat) lists.

    Raises:
        DataError: a feature is missing or of the wrong shape, or the columns differ in their number of rows.
    """

    def __init__(self, given: Any, schema: FeedSchema) -> None:
        self._schema = schema
        self._columns: dict[str, Tensor] = {}
        for column in schema.features:
            self._columns |= _lists(column, given) if column.ragged else {column.name: _tensor(column, given)}
        counts = {name: len(values) for name, values in self._columns.items()}
        if len(set(counts.values())) > 1:
            raise DataError(f"the columns differ in their number of rows: {counts}")
        self.num_rows = next(iter(counts.values()), 0)

    def batch(self, begin: int, end: int) -> dict[str, Tensor]:
        """Rows [begin, end) as the feed delivers them, on the CPU."""
        part = {name: values[begin:end] for name, values in self._columns.items()}
        for column in self._schema.features:
            if column.ragged:
                part |= from_padded(column, part.pop(column.name), part.pop(f"{column.name}_length"))
        return part


def _lists(column: ColumnInfo, given: Any) -> dict[str, Tensor]:
    length = f"{column.name}_length"
    values, lengths = _column(given, column.name), np.asarray(_column(given, length), np.int64)
    try:
        padded = np.asarray(list(values)) if len(values) else np.zeros((0, 0), column.dtype)
    except ValueError as error:
        raise DataError(f"column {column.name!r} is no array [rows, longest] of {column.dtype}: {error}") from error
    if padded.ndim != 2 or lengths.shape != padded.shape[:1] or (lengths < 0).any() or (lengths > padded.shape[1]).any():
        raise DataError(
            f"column {column.name!r} has shape {padded.shape} and lengths of shape {lengths.shape}; the model takes "
            f"(rows, longest) and, in {length!r}, for each row from 0 to longest"
        )
    padded[np.arange(padded.shape[1]) >= lengths[:, None]] = 0  # whatever is there, it counts for nothing
    return {column.name: torch.from_numpy(_cast(column, padded)), length: torch.from_numpy(lengths)}


def _tensor(column: ColumnInfo, given: Any) -> Tensor:
    values = _column(given, column.name)
    if isinstance(values, pd.Series) and column.shape:
        values = [np.asarray(value) for value in values]
    array = _cast(column, np.asarray(values))
    if array.ndim == 2 and column.shape and array.shape[1] == math.prod(column.shape):
        array = array.reshape(-1, *column.shape)
    if array.shape[1:] != tuple(column.shape):
        wanted = ", ".join(map(str, ("rows", *column.shape)))
        raise DataError(f"column {column.name!r} has shape {array.shape}; the model takes ({wanted})")
    return torch.from_numpy(np.ascontiguousarray(array))


def _cast(column: ColumnInfo, given: np.ndarray) -> np.ndarray:
    """The values in the column's dtype; refuses those that would become others, except by rounding to a float."""
    try:
        with np.errstate(invalid="ignore"):  # the comparison tells
            cast = given.astype(column.dtype, copy=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"column {column.name!r} is no array of {column.dtype}: {error}") from error
    changed = cast != given if np.issubdtype(cast.dtype, np.integer) else np.zeros(0, bool)
    if np.any(changed):
        example = given[changed][0]
        raise DataError(f"column {column.name!r} holds {example}; the model takes {column.dtype}, which cannot hold it")
    return cast


def _column(given: Any, name: str) -> Any:
    names = list(given.columns if isinstance(given, pd.DataFrame) else given)
    if name not in names:
        raise DataError(f"the input has no column {name!r}; it has {', '.join(capped([*map(str, names)])) or 'none'}")
    return given[name]
