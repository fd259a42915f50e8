"""Which group does a function of the user's say each row belongs to? For split rules with `by: groups.py:patient`."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import DataError
from penstock.ingest.columns.as_numpy import as_numpy
from penstock.ingest.columns.fixed_shape import single_chunk
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.spec import PATH
from penstock.messages import said_of

__all__ = ["NO_FUNCTIONS", "Functions", "called_groups", "paths_of"]


Functions = Mapping[str, Callable[..., Any]]
"""What `by` names -> the user's function."""

NO_FUNCTIONS: Functions = {}


def called_groups(
    function: Callable[..., Any], target: str, split: str, table: pa.Table, files: Sequence[SourceFile]
) -> pa.Array:
    """Call `function` with the rows, and check what comes back: one group a row, none of them null.

    Args:
        target: how the pipeline file names it.
        files: the file of all rows, or the file of each.

    Raises:
        DataError: it raises, or returns something else than a text or a number for each row.
    """
    where, rows = f"data.{split}.by: {target}", table.num_rows
    columns = _Columns(table, files)
    try:
        result = function(columns)
    except Exception as error:  # the user's code: any error is reported with its place
        frame = [each for each in traceback.extract_tb(error.__traceback__) if each.filename != __file__][-1]
        raise DataError(
            f"{where} raised {said_of(error)} ({frame.filename}, line {frame.lineno})",
            problems=[f"it was given {rows} rows of {files[0].uri}"],
            next_step=f"correct {target}; it gets numpy arrays by the names {', '.join(columns)}",
        ) from error
    wanted = f"correct {target}: return one text or whole number for each row"
    try:
        array = np.asarray(result)
        if array.shape != (rows,):
            raise DataError(f"{where} returned an array of shape {list(array.shape)} for {rows} rows", next_step=wanted)
        groups = pa.array(array.tolist() if array.dtype.kind in "OUS" else array, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"{where} returned what is no array of groups: {error}", next_step=wanted) from error
    if groups.null_count:
        raise DataError(
            f"{where} gives no group (None or NaN) to {groups.null_count} of {rows} rows of {files[0].uri}",
            next_step=wanted,
        )
    return groups


def paths_of(table: pa.Table, files: Sequence[SourceFile]) -> pa.Array:
    """The path of each row's file below its location."""
    return pa.array([file.name for file in files]) if len(files) > 1 else pa.repeat(files[0].name, table.num_rows)


class _Columns(Mapping[str, np.ndarray]):
    """The rows as the function sees them; a column is converted when it is looked at, since few are."""

    def __init__(self, table: pa.Table, files: Sequence[SourceFile]) -> None:
        if PATH not in table.column_names:
            table = table.append_column(PATH, paths_of(table, files))
        self._table = table

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._table.column_names:
            raise KeyError(name)
        return as_numpy(single_chunk(self._table.column(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.column_names)

    def __len__(self) -> int:
        return self._table.num_columns
