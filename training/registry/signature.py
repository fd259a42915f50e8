"""Which signature does MLflow show for a model's inputs and outputs? The source's columns with their types, and the answer's.

MLflow compares types strictly: it refuses a null in an integer column, and times with a zone. Columns of which that would be
wrong are declared without a type; the model's own check of the rows names what does not fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from mlflow.models import ModelSignature
from mlflow.types.schema import AnyType, Array, ColSpec, DataType, Object, ParamSchema, ParamSpec, Property, Schema

from penstock.ingest.columns.images import holds_images
from penstock.training.registry.raw_rows import RawForm

__all__ = ["model_signature"]


def model_signature(form: RawForm, answer: pd.DataFrame | None) -> ModelSignature:
    """The signature of a model.

    Args:
        answer: to the input example; None where the model cannot predict.
    """
    inputs: list[Any] = []
    for field in form.arrow_schema:
        if field.name != form.label:
            kind = _any_type(field.type, null=field.name in form.nullable)
            inputs.append(ColSpec(kind, field.name, required=field.name not in form.unneeded))
    params = ParamSchema(
        [ParamSpec("columns", DataType.string, [], shape=(-1,)), ParamSpec("on_error", DataType.string, "raise")]
    )
    return ModelSignature(Schema(inputs), None if answer is None else _outputs(answer), params)


def _any_type(kind: pa.DataType, *, null: bool) -> Any:
    if null and (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        return AnyType()
    return _type(kind)


def _type(kind: pa.DataType) -> Any:
    if pa.types.is_boolean(kind):
        return DataType.boolean
    if pa.types.is_integer(kind):
        return DataType.long
    if pa.types.is_floating(kind):
        return DataType.double
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return DataType.string
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or holds_images(kind):
        return DataType.binary
    if pa.types.is_timestamp(kind) and kind.tz is None:
        return DataType.datetime
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return Array(_type(kind.value_type))
    if pa.types.is_struct(kind):
        return Object([Property(field.name, _type(field.type), required=False) for field in kind])
    return AnyType()


def _outputs(answer: pd.DataFrame) -> Schema:
    return Schema([ColSpec(_cells(answer[name]), name) for name in answer.columns])


def _cells(values: pd.Series) -> Any:
    first = values.iloc[0] if len(values) else None
    if isinstance(first, list | np.ndarray):
        kind: Any = DataType.double if isinstance(first, list) else DataType.float
        for _ in range(np.ndim(first)):
            kind = Array(kind)
        return kind
    if pd.api.types.is_integer_dtype(values.dtype):
        return DataType.long
    return DataType.string if values.dtype == object or isinstance(values.dtype, pd.StringDtype) else DataType.double
