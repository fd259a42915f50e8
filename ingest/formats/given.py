"""Which tables hold the rows that a program gives? Decided by what the object offers, so that no library is imported for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["GIVEN", "is_ray_dataset", "tables_of"]

GIVEN = (
    "pandas or polars DataFrames, Arrow tables or record batches, dicts of arrays, structured numpy arrays, dicts of one row "
    "each, datasets of Ray, Hugging Face or torch"
)
"""What `tables_of` takes, for messages."""

BATCH_ROWS = 8192
"""Rows that are gathered to a table where they come one by one."""


def is_ray_dataset(value: Any) -> bool:
    """Return whether it is a `ray.data.Dataset`, whose rows lie on a cluster."""
    return type(value).__module__.startswith("ray.") and hasattr(value, "write_datasink")


def tables_of(value: Any) -> Iterable[Any]:
    """Return the parts of `value`: Arrow tables, frames, or dicts of arrays; another object is a part as it is.

    Rows come one by one from a list or an iterator of dicts, and from a torch dataset. An item that is a pair, as torchvision
    gives it, becomes the columns `x` and `y`. A dict whose values are all lists or arrays is a table, not a row.
    """
    module = type(value).__module__.partition(".")[0]
    if hasattr(value, "with_format") and hasattr(value, "iter"):  # of Hugging Face, in memory or streamed
        return value.with_format("arrow").iter(batch_size=65536)  # type: ignore[no-any-return]
    if module != "pandas" and hasattr(value, "__arrow_c_stream__"):  # polars and others
        return [pa.table(value)]
    if hasattr(value, "columns") or isinstance(value, Mapping | np.ndarray | str | bytes):
        return [value]
    if hasattr(value, "__getitem__") and hasattr(value, "__len__") and not hasattr(value, "__iter__"):  # of torch
        return _gathered(value[index] for index in range(len(value)))
    return _gathered(value) if isinstance(value, Iterable) else [value]


def _gathered(items: Iterable[Any]) -> Iterator[Any]:
    """Yield items that are tables as they are, and rows as dicts of arrays."""
    rows: list[Mapping[str, Any]] = []
    for item in items:
        row = _row(item)
        if rows and (row is None or len(rows) == BATCH_ROWS):
            yield _table(rows)
            rows = []
        if row is None:
            yield item
        else:
            rows.append(row)
    if rows:
        yield _table(rows)


def _row(item: Any) -> Mapping[str, Any] | None:
    if isinstance(item, tuple) and len(item) == 2:
        return {"x": item[0], "y": item[1]}
    if not isinstance(item, Mapping) or all(isinstance(value, list | tuple | np.ndarray) for value in item.values()):
        return None
    return item


def _table(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rows by column; a row without a column has null there, as in JSON lines."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _column([_as_numpy(row.get(name)) for row in rows]) for name in names}


def _as_numpy(value: Any) -> Any:
    """Return a tensor or an image of Pillow as an array, and another value as it is."""
    return np.asarray(value) if hasattr(value, "__array_interface__") or hasattr(value, "detach") else value


def _column(values: list[Any]) -> Any:
    """Stack arrays of one shape, [...] to [rows, ...]; others are a list."""
    shapes = {value.shape if isinstance(value, np.ndarray) else None for value in values}
    return np.stack(values) if len(shapes) == 1 and None not in shapes else values
