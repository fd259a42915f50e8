"""How is a function or a class of the user applied to rows, and how is its error reported?"""

from __future__ import annotations

import contextlib
import inspect
import json
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, GetJsonSchemaHandler, PositiveFloat, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, to_jsonable_python

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.columns.casts import cast_array, first_bad_row, is_list
from penstock.ingest.columns.fixed_shape import fixed_shape, is_number, missing_values, numbers
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.transform import Functions, Transform
from penstock.ingest.spec import DataSpec
from penstock.messages import describe_error

__all__ = [
    "FROM",
    "KEEP",
    "MapBatches",
    "MapBatchesOptions",
    "as_numpy",
    "columns_of_result",
    "forget_instances",
    "guarded",
    "ready",
    "row_values",
    "wrong_result",
]

KEEP = "_keep"
"""A boolean column that the function may add: rows where it is false are left out and counted."""

FROM = "_from"
"""A column of integers that the function adds if it returns another number of rows: from which of the given rows each is."""

_instances: dict[tuple[Any, str, str], Any] = {}

_making = threading.RLock()  # a class may load a registered model, which makes classes, too

_MOST_INSTANCES = 8


class MapBatchesOptions(Section):
    """A function or a class of the user: dict of column name to numpy array in, the same out.

    It sees up to 4096 rows of one file and one split at a time (256 where there are images to decode). Numbers come as arrays
    [rows, *shape], numbers with nulls as floats with NaN, lists as arrays of their own dtype, text and bytes as objects. It
    must return the same for the same rows; a boolean column `_keep` that is False leaves a row out. If it returns more or fewer
    rows than it got, a column `_from` has the index of the given row that each comes from, ascending. A column that is returned
    as it came keeps its type and its nulls. A class is made once in each process, and its `__call__` gets the rows.
    """

    function: Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_]\w*$")]
    """`transforms.py:normalize`, relative to the pipeline file."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of every call; those of the constructor for a class."""
    num_gpus: PositiveFloat | None = None
    """GPUs of a process that prepares, for a model; its tasks run where GPUs are. Needs `cache: disk`. `check` and the
    registered model call it without."""

    @field_validator("params")
    @classmethod
    def _as_recorded(cls, params: dict[str, Any]) -> dict[str, Any]:
        """Give code what the record of the run and the registered model hold, in each of its calls: dates as text."""
        for key in _other_keys(params):
            raise ValueError(f"the key {key!r} is not text, which it becomes on record; write it as '{key}', or give a list")
        kept: dict[str, Any] = to_jsonable_python(params)
        return kept

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """Accept a function by its name alone."""
        return {"function": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe the short form to editors, too."""
        schema = handler.resolve_ref_schema(handler(core))
        whole = dict(schema)
        schema.clear()
        schema["anyOf"] = [whole, {"type": "string"}]
        return schema


class MapBatches(Transform[MapBatchesOptions]):
    """User code: `transforms.py:normalize`, a function with params, or a class, such as one that holds a model."""

    Options = MapBatchesOptions
    widens_rows = True
    makes_columns = True

    def __init__(self, name: str, options: MapBatchesOptions) -> None:
        super().__init__(name, options)
        self.function, self.num_gpus = options.function, options.num_gpus or 0.0

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        target, function = f"{self.name} {self.function}", ready(self, functions)
        batch = {name: as_numpy(rows.column(name)) for name in rows.table.column_names}
        takes = f"a dict of numpy arrays with the columns {', '.join(batch)}"
        with guarded(target, rows.where, takes):
            result = function(dict(batch))
        if not isinstance(result, dict) or not result.keys() - {KEEP, FROM}:
            raise wrong_result(target, f"returned {type(result).__name__}; it must return a dict of column name to array")
        index = _given_rows_of(target, result[FROM], rows.num_rows) if FROM in result else None
        count = rows.num_rows if index is None else len(index)
        keep, result = result.get(KEEP), {name: values for name, values in result.items() if name not in (KEEP, FROM)}
        columns = columns_of_result(target, rows, batch, result, count)
        if keep is not None:
            _from_numpy(target, KEEP, keep, count)
            if (kept := np.asarray(keep)).dtype != np.bool_:
                raise wrong_result(target, f"returned {KEEP!r} of dtype {kept.dtype}; it must hold True or False for each row")
        if index is None:
            rows.table = pa.table(columns)
        else:
            rows.replace(pa.table(columns), index, self.name)
        if keep is not None:
            rows.filter(kept, self.name)


def wrong_result(target: str, problem: str) -> DataError:
    """Make the error for what the user's code returned: the code is wrong, not the rows."""
    return DataError(f"{target} {problem}", next_step=f"correct {target.partition(' ')[2]}")


def ready(transform: Transform[Any], functions: Functions) -> Callable[..., Any]:
    """Return the user's function with its params, or this process's instance of the user's class, which is made with them.

    Raises:
        DataError: the constructor failed.
    """
    function, params = functions[str(transform.function)], transform.options.params
    if not inspect.isclass(inspect.unwrap(function)):
        return partial(function, **params)
    digest = getattr(function, "digest", "")  # of `UserCode.function`, which wraps anew in each call
    key = function.__wrapped__ if digest else function, digest, json.dumps(params, sort_keys=True)
    with _making:
        if key not in _instances:
            if len(_instances) >= _MOST_INSTANCES:
                del _instances[next(iter(_instances))]
            with guarded(f"{transform.name} {transform.function}", lambda: "its params, to be made", f"the params {params}"):
                _instances[key] = function(**params)
        made: Callable[..., Any] = _instances[key]
        return made


def forget_instances() -> None:
    """Free the instances that this process has made: a model may take much of its memory."""
    with _making:
        _instances.clear()


@contextlib.contextmanager
def guarded(target: str, given: Callable[[], str], takes: str) -> Iterator[None]:
    """Run the user's code in the block.

    Raises:
        DataError: it failed; with its place, and the rows that were given.
    """
    try:
        yield
    except Exception as error:  # the user's code: any error is reported with its place
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"{target} raised {describe_error(error)} ({frame.filename}, line {frame.lineno})",
            problems=[f"it was given {given()}"],
            next_step=f"correct {target.partition(' ')[2]}; it gets {takes}",
        ) from error


def columns_of_result(
    target: str, rows: Rows, batch: Mapping[str, Any], result: dict[str, Any], count: int | None = None
) -> dict[str, pa.Array]:
    """Return the columns that the user's code made of `rows`; one that came back as it was given keeps its type and its nulls.

    Args:
        batch: the columns as they were given.
        count: rows of the result; None for as many as of `rows`.

    Raises:
        DataError: a column cannot be kept, has another number of rows, or a name that is not text.
    """
    columns, count = {}, rows.num_rows if count is None else count
    for name, values in result.items():
        if not isinstance(name, str):
            raise wrong_result(target, f"returned a column called {name!r}; a name must be text")
        given = rows.column(name) if name in batch else None
        if given is not None and values is batch[name] and len(given) == count and _is_as_given(values, given):
            columns[name] = given
            continue
        if given is not None:
            _refuse_rounded(target, rows, name, given)
        # Copied: a class may fill an array of its own again when it is called with the next rows.
        columns[name] = _from_numpy(target, name, values, count, copied=given is None or values is not batch[name])
    return columns


def _other_keys(value: Any) -> Iterator[Any]:
    """Yield the keys of dicts in a value that are not text."""
    if isinstance(value, dict):
        yield from (key for key in value if not isinstance(key, str))
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _other_keys(inner)


def _given_rows_of(target: str, values: Any, count: int) -> np.ndarray:
    """Check `_from`: ascending, so that rows keep the order of the source whatever is prepared together."""
    index = np.asarray(values)
    whole = index.ndim == 1 and (index.dtype.kind in "iu" or not len(index))
    if not whole or (len(index) and (index.min() < 0 or index.max() >= count)) or (np.diff(index.astype(np.int64)) < 0).any():
        held = f"an integer from 0 to {count - 1} for each row it returns, ascending"
        raise wrong_result(target, f"returned {FROM!r}, which must hold {held}")
    return index.astype(np.int64)


def _is_as_given(array: np.ndarray, values: pa.Array) -> bool:
    """Whether a column that changes by conversion to numpy and back was returned unchanged."""
    is_plain = is_number(values.type) and not pa.types.is_boolean(values.type) and not values.null_count
    if is_plain or (array.ndim > 1 and array.dtype != object):
        return False
    given = as_numpy(values)
    if array.dtype != object:
        return bool(np.array_equal(given, array, equal_nan=array.dtype.kind in "fmM"))
    return all(_equal(one, other) for one, other in zip(given.tolist(), array.tolist(), strict=True))


def _refuse_rounded(target: str, rows: Rows, name: str, given: pa.Array) -> None:
    """Raise DataError if the function changed a column whose integers were rounded before."""
    if not pa.types.is_integer(given.type) or not given.null_count:
        return
    try:
        cast_array(given, pa.float64())
    except pa.ArrowInvalid as error:
        row = first_bad_row(given, pa.float64())
        raise DataError(
            f"{target} changed column {name!r}, which becomes floats because there are nulls in it; "
            f"{rows.origin.place(row)} holds {given[row]}, and floats may round integers beyond 2**53",
            next_step=f"fill the nulls before it (imputer), or return {name} as it came and what is made of it "
            "under another name",
        ) from error


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _as_rows(array: np.ndarray) -> np.ndarray:
    rows = np.empty(len(array), object)
    rows[:] = [np.asarray(row.tolist()) for row in array]
    return rows


def _joined_lists(array: np.ndarray) -> pa.Array | None:
    """An array of one-dimensional arrays of numbers, or None, as lists in the dtype of those that are not empty."""
    if array.dtype != object or array.ndim != 1 or not any(isinstance(value, np.ndarray) for value in array):
        return None
    missing = np.array([value is None for value in array])
    rows = [np.empty(0) if value is None else value for value in array]
    if not all(isinstance(row, np.ndarray) and row.ndim == 1 and row.dtype.kind in "biuf" for row in rows):
        return None
    filled = [row for row in rows if len(row)] or rows[:1]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(row) for row in rows])])
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(filled)), mask=pa.array(missing))


def _from_numpy(target: str, name: str, values: Any, count: int, *, copied: bool = False) -> pa.Array:
    try:
        array = np.array(values) if copied else np.asarray(values)
    except ValueError as error:
        raise wrong_result(target, f"returned column {name!r}, which is not an array of one shape: {error}") from error
    if array.ndim == 0 or len(array) != count:
        got = "a scalar" if array.ndim == 0 else f"{len(array)} rows"
        raise DataError(
            f"{target}: column {name!r} came back with {got} for {count} rows",
            next_step=f"to leave rows out, return a boolean column {KEEP!r} with False for them; for another number of "
            f"rows, return a column {FROM!r} with the index of the given row that each comes from",
        )
    if array.dtype.kind in "biuf":
        return tensor_array(array)
    try:
        if array.dtype == object and array.ndim == 2:  # what numpy makes of lists that happen to have one length
            array = _as_rows(array)
        lists = _joined_lists(array)
        if lists is not None:
            return lists
        if array.dtype == object and len(array) and isinstance(array[0], np.ndarray):
            return pa.array([None if value is None else np.asarray(value).tolist() for value in array])
        return pa.array(array.tolist() if array.dtype.kind in "OUS" else array, from_pandas=True)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise wrong_result(target, f"returned column {name!r} of dtype {array.dtype}, which cannot be kept: {error}") from error


def as_numpy(values: pa.Array) -> np.ndarray:
    """Return a column for a function: numbers as arrays [rows, *shape], with nulls as floats with NaN; else objects."""
    if isinstance(values.type, pa.FixedShapeTensorType) or pa.types.is_fixed_size_list(values.type):
        shaped = None if values.null_count else fixed_shape("", values, is_label=False)
        if isinstance(shaped, pa.Array) and not missing_values(shaped)[0].any():
            return _writable(numbers(shaped))
    if is_number(values.type) and not values.null_count:
        return _writable(values.to_numpy(zero_copy_only=False))
    if is_number(values.type):
        return _writable(values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
    if pa.types.is_timestamp(values.type) or pa.types.is_date(values.type):
        return _writable(values.to_numpy(zero_copy_only=False))
    objects = np.empty(len(values), object)
    for row, value in enumerate(_lists_of_numbers(values) or _plain_values(values)):
        objects[row] = value
    return objects


def row_values(values: pa.Array) -> list[Any]:
    """Return the value of each row as `as_numpy` gives it of the row alone: a null elsewhere makes no float of an integer."""
    present, leaf = values.drop_null(), values.type
    while hasattr(leaf, "value_type"):
        leaf = leaf.value_type
    held: Any = as_numpy(present)
    if held.dtype == object and is_number(leaf) and _lists_of_numbers(present) is None:  # an entry is missing
        held = [as_numpy(present.slice(row, 1))[0] for row in range(len(present))]
    rows, null = iter(held), next(iter(as_numpy(values.filter(values.is_null()))), None)
    return [next(rows) if there else null for there in values.is_valid().to_pylist()]


def _lists_of_numbers(values: pa.Array) -> list[np.ndarray | None] | None:
    """Return each row's list as an array of the entries' own dtype; None for other columns."""
    kind = values.type
    if not is_list(kind) or not (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)):
        return None
    entries = values.flatten()  # without those of null rows
    if entries.null_count:
        return None
    flat = entries.to_numpy(zero_copy_only=False).copy()
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    rows = zip(lengths, np.cumsum(lengths), values.is_valid().to_pylist(), strict=True)
    return [flat[end - length : end] if there else None for length, end, there in rows]


def _plain_values(values: pa.Array) -> list[Any]:
    plain = values.to_pylist()
    return [np.asarray(value) if isinstance(value, list) else value for value in plain]


def _writable(values: np.ndarray) -> np.ndarray:
    return values if values.flags.writeable else values.copy()
