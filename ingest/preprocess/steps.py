"""What may a pipeline file ask to be done to the rows? One section per kind of `preprocess` step.

A step is written as one key with its options: `- standard_scaler: {columns: [age, fare]}`. Steps run in the order written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import AfterValidator, Field, GetJsonSchemaHandler, PositiveInt, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.fixed_shape import is_number, is_text
from penstock.ingest.columns.type_text import parse_type

__all__ = [
    "ALL_COLUMNS",
    "ConcatenatorOptions",
    "DecodeImageOptions",
    "EncoderOptions",
    "ImputerOptions",
    "LabelEncoderOptions",
    "MapBatchesOptions",
    "NullMaskOptions",
    "OneHotOptions",
    "PreprocessStep",
    "RaggedOptions",
    "RobustScalerOptions",
    "ScalerOptions",
    "columns_of_step",
]


ALL_COLUMNS = "*"
"""Instead of a list of columns: every column the step can take, the label left out."""


def _no_repeats(columns: Any) -> Any:
    if columns != ALL_COLUMNS and len(set(columns)) != len(columns):
        raise ValueError(f"a column is named twice: {columns}")
    return columns


def _is_type(text: str) -> str:
    parse_type(text)
    return text


Columns = Annotated[Literal["*"] | Annotated[list[str], Field(min_length=1)], AfterValidator(_no_repeats)]

TypeText = Annotated[str, AfterValidator(_is_type)]


class ScalerOptions(Section):
    """Numeric columns that become float32 on a common scale."""

    columns: Columns
    """Names, or `*` for every numeric column but the label."""


class RobustScalerOptions(ScalerOptions):
    """As the other scalers, by median and quantile range, which outliers do not move."""

    quantile_range: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(gt=0, le=1)]] = (0.25, 0.75)
    """Lower and upper quantile whose distance becomes 1."""

    @model_validator(mode="after")
    def _ordered(self) -> RobustScalerOptions:
        if self.quantile_range[0] >= self.quantile_range[1]:
            raise ValueError(f"quantile_range {list(self.quantile_range)} must rise")
        return self


class ImputerOptions(Section):
    """Columns whose missing values (null or NaN) are filled."""

    columns: Columns
    """Names, or `*` for every numeric column but the label."""
    strategy: Literal["mean", "most_frequent", "constant"] = "mean"
    """`mean` and `most_frequent` are learnt from the train split; `mean` makes the column float64."""
    fill_value: str | bool | int | float | None = None
    """Only for `strategy: constant`."""

    @model_validator(mode="after")
    def _constant_has_value(self) -> ImputerOptions:
        if (self.strategy == "constant") != (self.fill_value is not None):
            raise ValueError("fill_value belongs to strategy: constant, and that strategy needs it")
        return self


class EncoderOptions(Section):
    """Categorical columns (strings, integers, booleans)."""

    columns: Columns
    """Names, or `*` for every string column but the label."""


class OneHotOptions(EncoderOptions):
    """A float32 vector per column with a 1 at the category's place; all zeros for a category not in the train split."""

    max_categories: PositiveInt | None = None
    """Keep only that many categories, the most frequent ones of the train split; the others become zeros."""


class LabelEncoderOptions(Section):
    """The label becomes the index of its class, int64, classes in sorted order."""

    column: str | None = None
    """The label's name at this point, if an earlier step renamed it; else `data.label`."""


class ConcatenatorOptions(Section):
    """Numbers and vectors put side by side into one vector column; the input columns go."""

    columns: Columns
    """Names, in the order of the vector, or `*` for all numbers and vectors but the label, in the order they stand."""
    output: str = "features"
    """Name of the vector column."""
    dtype: Literal["float32", "float64", "float16"] = "float32"
    """Type of its elements."""


class DecodeImageOptions(Section):
    """An encoded image (bytes, or a struct with `bytes`) becomes uint8 [height, width, channels], upright by its EXIF tag."""

    column: str = "image"
    """The column that holds the encoded images."""
    size: tuple[PositiveInt, PositiveInt] | None = None
    """(height, width) in pixels to resize to, instead of `data.images.size`. Without either, all images must agree."""
    mode: Literal["RGB", "L"] | None = None
    """RGB gives 3 channels, L (grey) 1; instead of `data.images.mode`."""
    keep: Literal["pixels", "encoded"] = "pixels"
    """What the cache holds, or a stream's window: `pixels`, the fastest to read; or the `encoded` images, which take a tenth of
    the room and are decoded anew by the threads that read ahead. Training sees the same either way."""


class RaggedOptions(Section):
    """Lists of numbers, of a length of its own in each row."""

    columns: Annotated[list[str], Field(min_length=1), AfterValidator(_no_repeats)]
    """Names."""
    batch: Literal["padded", "packed"] = "padded"
    """What a recipe gets. `padded`: `x` [rows, longest of the batch] and `x_length`, int64 [rows]. `packed`: `x`, the entries
    of all rows one after the other, and `x_offsets`, int64 [rows + 1]: row i is `x[x_offsets[i]:x_offsets[i + 1]]`."""
    dtype: Literal["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"] | None = None
    """Type of the entries, instead of the source's. An entry that does not fit is an error."""
    pad_value: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """What stands behind the last entry of a row in a padded batch."""
    max_length: PositiveInt | None = None
    """Cut longer lists after so many entries."""


class NullMaskOptions(Section):
    """Columns that may be null: the value becomes 0 there, and a new column says where."""

    columns: Annotated[list[str], Field(min_length=1), AfterValidator(_no_repeats)]
    """Names of number columns. Column `x` gets a column `x_is_null` beside it: uint8, 1 where there was a null or NaN."""


class MapBatchesOptions(Section):
    """A function of the user's: dict of column name to numpy array in, the same out.

    It sees up to 4096 rows of one file and one split at a time (256 where there are images to decode). Numbers come as arrays
    [rows, *shape], numbers with nulls as floats with NaN, text and bytes as objects. It must return as many rows as it got, and
    the same for the same rows; a boolean column `_keep` that is False leaves a row out.
    """

    function: Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_]\w*$")]
    """`transforms.py:normalize`, relative to the pipeline file."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of every call."""


class PreprocessStep(Section):
    """One step; exactly one of the fields is set. One without options is written by its name alone: `- label_encoder`."""

    standard_scaler: ScalerOptions | None = None
    """(x - mean) / standard deviation, both of the train split."""
    min_max_scaler: ScalerOptions | None = None
    """(x - min) / (max - min): the train split fills 0 to 1."""
    max_abs_scaler: ScalerOptions | None = None
    """x / max(abs(x))."""
    robust_scaler: RobustScalerOptions | None = None
    """(x - median) / quantile range."""
    imputer: ImputerOptions | None = None
    """Fill missing values."""
    one_hot: OneHotOptions | None = None
    """A vector per categorical column."""
    ordinal: EncoderOptions | None = None
    """An int64 index per category, in sorted order; a category that the train split does not have is an error."""
    label_encoder: LabelEncoderOptions | None = None
    """Class names to class indices."""
    concatenator: ConcatenatorOptions | None = None
    """One vector out of several columns."""
    cast: Annotated[dict[str, TypeText] | None, Field(min_length=1)] = None
    """Column to Arrow type; a time becomes seconds since 1970 when cast to a number. A value that does not fit is an error."""
    rename: Annotated[dict[str, str] | None, Field(min_length=1)] = None
    """Old name to new name."""
    drop: Annotated[list[str] | None, Field(min_length=1)] = None
    """Columns to leave out."""
    decode_image: DecodeImageOptions | None = None
    """Encoded images to pixels."""
    ragged: RaggedOptions | None = None
    """Lists of unequal length, such as tokens: batches hold them padded or packed."""
    null_mask: NullMaskOptions | None = None
    """Nulls to zeros, and a column that says where they were."""
    map_batches: MapBatchesOptions | None = None
    """User code: `transforms.py:normalize`, or a function with params."""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        """Accept a bare kind (`- label_encoder`), a kind without options (`label_encoder:`), and a function by its name."""
        if isinstance(value, str):
            value = {value: None}
        if isinstance(value, dict) and len(value) == 1:
            kind, options = next(iter(value.items()))
            if kind == "map_batches" and isinstance(options, str):
                return {kind: {"function": options}}
            if kind in cls.model_fields and options is None:
                return {kind: {}}
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Tell editors of the short forms too."""
        schema = handler.resolve_ref_schema(handler(core))
        whole = dict(schema)
        whole["properties"]["map_batches"]["anyOf"].append({"type": "string"})
        schema.clear()
        schema["anyOf"] = [whole, {"type": "string", "enum": list(cls.model_fields)}]
        return schema

    @model_validator(mode="after")
    def _one_kind(self) -> PreprocessStep:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            kinds = ", ".join(type(self).model_fields)
            raise ValueError(f"a step is exactly one of {kinds}; this one has {' and '.join(given) or 'none'}")
        return self

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def options(self) -> Any:
        """Value of the field that is set."""
        return getattr(self, self.kind)

    @property
    def is_fitted(self) -> bool:
        """Whether the step learns something from the train split."""
        if self.imputer is not None:
            return self.imputer.strategy != "constant"
        return self.kind in ("standard_scaler", "min_max_scaler", "max_abs_scaler", "robust_scaler", "one_hot", "ordinal") or (
            self.kind == "label_encoder"
        )


def columns_of_step(step: PreprocessStep, schema: pa.Schema, label: str | None) -> list[str]:
    """Name the input columns of a scaler, imputer, encoder or concatenator, where the rows have `schema` before it.

    Raises:
        DataError: a column is not there, has a type the step cannot take, or `*` matches none.
    """
    if step.label_encoder is not None:
        wanted: Sequence[str] = [step.label_encoder.column or label or ""]
        if not wanted[0]:
            raise DataError("preprocess: label_encoder needs a label", next_step="set data.label, or label_encoder.column")
    else:
        wanted = step.options.columns
    categorical = step.one_hot is not None or step.ordinal is not None
    if wanted == ALL_COLUMNS:
        fits = is_text if categorical else _joins if step.concatenator is not None else is_number
        wanted = [field.name for field in schema if field.name != label and fits(field.type)]
        if not wanted:
            raise DataError(f"preprocess: {step.kind}: `*` matches no column; the rows have {_listed(schema)}")
    missing = [name for name in wanted if name not in schema.names]
    if missing:
        raise DataError(
            f"preprocess: {step.kind}: there is no column {missing[0]!r} at this step; the rows have {_listed(schema)}",
            next_step=f"correct preprocess.{step.kind}, or the steps before it",
        )
    for name in wanted:
        _check_type(step, name, schema.field(name).type)
    return list(wanted)


def _check_type(step: PreprocessStep, name: str, kind: pa.DataType) -> None:
    if step.concatenator is not None:
        takes, advice = is_number(kind) or _is_vector(kind), "one_hot or ordinal it first, or cast it"
    elif step.imputer is not None and step.imputer.strategy == "most_frequent":
        takes, advice = is_text(kind) or is_number(kind), "cast it to string or a number first"
    elif step.imputer is not None and step.imputer.strategy == "constant":
        takes, advice = not pa.types.is_nested(kind), "leave it out"
    elif step.kind in ("one_hot", "ordinal", "label_encoder"):
        takes = is_text(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)
        advice = "cast it to string or int64 first"
    elif step.imputer is not None and is_text(kind):
        takes, advice = False, "the mean is for numbers: give strategy: most_frequent, or constant with a fill_value"
    else:
        takes, advice = is_number(kind), f"cast it first (cast: {{{name}: float64}}), or use one_hot or ordinal for categories"
    if not takes:
        raise DataError(f"preprocess: {step.kind} cannot take column {name!r} of type {kind}", next_step=advice)


def _joins(kind: pa.DataType) -> bool:
    # Pictures are tensors too, and nobody who writes `*` means their pixels.
    return is_number(kind) or (isinstance(kind, pa.FixedShapeTensorType) and len(kind.shape) == 1)


def _is_vector(kind: pa.DataType) -> bool:
    # Lists of varying length are found out when the rows are looked at.
    return (
        isinstance(kind, pa.FixedShapeTensorType)
        or pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or (pa.types.is_fixed_size_list(kind))
    )


def _listed(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
