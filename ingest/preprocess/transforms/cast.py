"""How does a column come to another type, and which row does not fit it?"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import AfterValidator, Field

from penstock.errors import DataError
from penstock.ingest.columns.casts import first_bad_row
from penstock.ingest.columns.fixed_shape import cast_column
from penstock.ingest.columns.type_text import parse_type, value_text
from penstock.ingest.columns.unreadable import cast_readable
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.request import Request, plain_numbers
from penstock.ingest.preprocess.transforms.transform import Functions, Transform
from penstock.ingest.spec import DataSpec

__all__ = ["Cast"]


def _misfit(values: pa.Array, kind: pa.DataType, row: int) -> str:
    return f"{value_text(values, row)} does not become {kind} without loss"


def _is_type(text: str) -> str:
    parse_type(text)
    return text


class Cast(Transform[dict[str, str]]):
    """Column to Arrow type; a time becomes seconds since 1970 as a number. What does not fit is an error; floats may round.

    Cast to float16 or float32 numbers round, whole ones too, and times by less than a second.
    """

    Options = Annotated[dict[str, Annotated[str, AfterValidator(_is_type)]], Field(min_length=1)]

    def named(self, label: str | None) -> Sequence[str]:
        return list(self.options)

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        self.require(rows, list(self.options))
        for name, text in self.options.items():
            values, kind = rows.column(name), parse_type(text)
            try:
                if data.invalid == "quarantine":
                    _, bad = cast_readable(values, functools.partial(cast_column, kind=kind))
                    rows.reject(bad, "unreadable", name, functools.partial(_misfit, values, kind))
                    values = rows.column(name)
                rows.put(name, cast_column(values, kind))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                row = first_bad_row(values, kind, cast_column)
                raise DataError(
                    f"preprocess: cast: {rows.origin.place(row)}: {name} holds {value_text(values, row)}, "
                    f"which does not become {kind} without loss",
                    next_step="cast it to another type, or repair the row",
                ) from error

    def apply_request(self, request: Request, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> Request:
        made = dict(request)
        for name, text in self.options.items():
            cast = _cast(request.get(name), _numpy_dtype(text))
            if cast is None:
                return super().apply_request(request, fitted, data, functions)
            made[name] = cast
        return made


@functools.lru_cache(1024)
def _numpy_dtype(text: str) -> np.dtype | None:
    """Dtype of a type of whole or wide floating numbers, else None."""
    kind = parse_type(text)
    wide = pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind)
    return np.dtype(kind.to_pandas_dtype()) if wide else None


def _cast(values: Any, dtype: np.dtype | None) -> np.ndarray | None:
    """Numbers in another dtype; None where a value may not fit it, or numpy and Arrow may differ."""
    if dtype is None or not plain_numbers(values):
        return None
    if dtype.kind == "f" or values.dtype.kind == "b" or np.can_cast(values.dtype, dtype):
        return values.astype(dtype)  # type: ignore[no-any-return]
    if values.dtype.kind == "f" or isinstance(values, np.ma.MaskedArray) or not values.size:
        return None
    bounds = np.iinfo(dtype)
    return values.astype(dtype) if int(values.min()) >= bounds.min and int(values.max()) <= bounds.max else None
