"""How is code of the user applied to one row at a time: to change a row, to make several of it, or to leave it out?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from penstock.errors import DataError
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.map_batches import (
    KEEP,
    MapBatches,
    MapBatchesOptions,
    columns_of_result,
    guarded,
    ready,
    row_values,
    wrong_result,
)
from penstock.ingest.preprocess.transforms.transform import Functions
from penstock.ingest.spec import DataSpec
from penstock.messages import shorten

__all__ = ["Filter", "FlatMap", "Map"]


class MapOptions(MapBatchesOptions):
    """A function or a class of the user: dict of column name to value in, the same out; otherwise as `map_batches`."""


class FlatMapOptions(MapBatchesOptions):
    """A function or a class of the user: dict of column name to value in, a list or a generator of dicts out, each a row.

    They keep the split of the row they are made of. The registered model refuses a row of which several are made.
    """


class FilterOptions(MapBatchesOptions):
    """A function or a class of the user: dict of column name to value in, True or False out; False leaves the row out."""


class Map(MapBatches):
    """User code for one row, which it changes."""

    Options: ClassVar[Any] = MapOptions
    returns = "a dict of the same columns for every row"

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        target, made, index = f"{self.name} {self.function}", list[dict[str, Any]](), list[int]()
        values = {name: row_values(rows.column(name)) for name in rows.table.column_names}
        for row, results in enumerate(_called(self, rows, values, functions, self._results)):
            for each in results:
                if not isinstance(each, dict) or not each or each.keys() != (made or [each])[0].keys() or KEEP in each:
                    kind = each if isinstance(each, type) else type(each)
                    got = list(each) if isinstance(each, dict) else kind.__name__
                    before = f"; {list(made[0])} before" if made else ""
                    raise DataError(
                        f"{target} returned {got} for {rows.origin.place(row)}{before}; it must return {self.returns}",
                        next_step=f"correct {self.function}; to leave rows out, use filter, or return no row of flat_map",
                    )
                made.append(each)
                index.append(row)
        taken, columns = np.array(index, np.int64), dict[str, pa.Array]()
        for name in made[0] if made else ():
            column = [each[name] for each in made]
            given, held = values.get(name, []), row_values(rows.column(name)) if name in values else []
            if given and all(_is_given(value, given[row], held[row]) for value, row in zip(column, index, strict=True)):
                columns[name] = rows.column(name).take(pa.array(taken))
            else:
                columns |= columns_of_result(target, rows, values, {name: _array(column)}, len(taken))
        rows.replace(pa.table(columns), taken, self.name)

    def _results(self, result: Any) -> list[Any]:
        return [_kept(result)]


class FlatMap(Map):
    """User code for one row, of which it makes several or none."""

    Options = FlatMapOptions
    keeps_rows = False
    returns = "a list of dicts of the same columns for every row"

    def _results(self, result: Any) -> list[Any]:
        if isinstance(result, dict | str) or not isinstance(result, Iterable):
            return [type(result)]
        return [_kept(each) for each in result]


class Filter(MapBatches):
    """User code for one row, which it leaves out or not."""

    Options = FilterOptions
    makes_columns = widens_rows = keeps_rows = False

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        values = {name: row_values(rows.column(name)) for name in rows.table.column_names}
        answers = list(_called(self, rows, values, functions, lambda answer: answer))
        for row, answer in enumerate(answers):
            if not isinstance(answer, bool | np.bool_):
                returned = f"returned {shorten(answer)} for {rows.origin.place(row)}; it must return True or False"
                raise wrong_result(f"{self.name} {self.function}", returned)
        rows.filter(np.array(answers, np.bool_), self.name)


def _called(
    transform: MapBatches, rows: Rows, values: dict[str, list[Any]], functions: Functions, take: Callable[[Any], Any]
) -> Iterator[Any]:
    """Call the user's code with each row, and yield what `take` makes of the result."""
    code, takes = ready(transform, functions), f"a dict with the columns {', '.join(values)}"
    for row, held in enumerate(zip(*values.values(), strict=True)):
        with guarded(f"{transform.name} {transform.function}", partial(rows.origin.place, row), takes):
            result = take(code(dict(zip(values, held, strict=True))))
        yield result


def _kept(result: Any) -> Any:
    """Copy a row: user code may change its dict, or a list or an array of it, and return it again as another row."""
    if not isinstance(result, dict):
        return result
    return {name: copy(value) if isinstance(value, np.ndarray | list) else value for name, value in result.items()}


def _is_given(value: Any, given: Any, held: Any) -> bool:
    if not isinstance(value, np.ndarray):
        return value is given and (not isinstance(value, dict) or value == held)
    same_type = isinstance(held, np.ndarray) and value.dtype == held.dtype
    return same_type and np.array_equal(value, held, equal_nan=value.dtype.kind == "f")


def _array(values: list[Any]) -> np.ndarray:
    """Return a column of values: arrays of one dtype and shape are stacked, and text and bytes stay objects."""
    first = values[0] if values else None
    if isinstance(first, np.ndarray) and all(
        isinstance(each, np.ndarray) and (each.shape, each.dtype) == (first.shape, first.dtype) for each in values
    ):
        return np.stack(values)
    if all(isinstance(each, bool | int | float | np.generic) and not isinstance(each, str | bytes) for each in values):
        made = np.asarray(values)
        exact = (int(new) == int(each) for each, new in zip(values, made, strict=True) if isinstance(each, int | np.integer))
        if made.dtype.kind != "f" or all(exact):  # floats would round integers beyond 2**53
            return made
    objects = np.empty(len(values), object)
    for row, value in enumerate(values):
        objects[row] = np.asarray(value) if isinstance(value, list) else value
    return objects
