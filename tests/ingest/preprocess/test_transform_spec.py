"""The `preprocess` section of a pipeline file: what may be written, and which columns a transform means."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from penstock.errors import DataError
from penstock.ingest.preprocess.transform_spec import TransformSpec

SCHEMA = pa.schema(
    [("age", pa.int64()), ("fare", pa.float64()), ("sex", pa.string()), ("label", pa.int64()), ("day", pa.timestamp("s"))]
)


def parse(step: Any) -> TransformSpec:
    return TransformSpec.model_validate(step)


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ({"standard_scaler": {"columns": ["age"]}}, "standard_scaler"),
        ({"map_batches": "transforms.py:normalize"}, "map_batches"),
        ({"map_batches": {"function": "transforms.py:normalize", "params": {"k": 2}}}, "map_batches"),
        ("label_encoder", "label_encoder"),
        ({"label_encoder": None}, "label_encoder"),
        ({"decode_image": {}}, "decode_image"),
        ({"cast": {"age": "float32"}}, "cast"),
        ({"drop": ["age"]}, "drop"),
    ],
)
def test_transform_is_one_kind_with_options(written: Any, kind: str) -> None:
    assert parse(written).kind == kind


@pytest.mark.parametrize("written", [{}, {"drop": ["a"], "rename": {"b": "c"}}])
def test_transform_of_no_kind_or_two_is_refused(written: Any) -> None:
    with pytest.raises(ValidationError, match=r"exactly one of standard_scaler, .*map_batches"):
        parse(written)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"standard_scalar": {"columns": ["a"]}}, "standard_scalar"),
        ({"standard_scaler": {"columns": []}}, "at least 1"),
        ({"standard_scaler": {"columns": ["a", "a"]}}, "named twice"),
        ({"standard_scaler": {"column": ["a"]}}, "column"),
        ({"cast": {"a": "flaot32"}}, "flaot32"),
        ({"map_batches": "transforms.py"}, "pattern"),
        ({"imputer": {"columns": ["a"], "strategy": "constant"}}, "fill_value"),
        ({"imputer": {"columns": ["a"], "fill_value": 3}}, "fill_value"),
    ],
)
def test_transform_wrong_option_is_named(written: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        parse(written)


def test_transform_survives_json() -> None:
    for written in ({"imputer": {"columns": ["a"], "strategy": "constant", "fill_value": 1}}, {"map_batches": "t.py:f"}):
        step = parse(written)
        assert TransformSpec.model_validate_json(step.model_dump_json()) == step


def test_needs_fit_only_for_learning_transforms() -> None:
    assert parse({"imputer": {"columns": ["a"]}}).transform.learns
    assert parse("label_encoder").transform.learns
    assert not parse({"imputer": {"columns": ["a"], "strategy": "constant", "fill_value": 0}}).transform.learns
    assert not parse({"concatenator": {"columns": ["a"]}}).transform.learns


@pytest.mark.parametrize(
    ("written", "columns"),
    [
        ({"standard_scaler": {"columns": "*"}}, ["age", "fare"]),
        ({"one_hot": {"columns": "*"}}, ["sex"]),
        ({"concatenator": {"columns": ["fare", "age"]}}, ["fare", "age"]),
        ("label_encoder", ["label"]),
        ({"label_encoder": {"column": "sex"}}, ["sex"]),
    ],
)
def test_star_is_every_fitting_column_but_the_label(written: Any, columns: list[str]) -> None:
    assert parse(written).transform.columns(SCHEMA, "label") == columns


def test_star_of_concatenator_takes_vectors_not_images() -> None:
    vector, picture = pa.fixed_shape_tensor(pa.float32(), [4]), pa.fixed_shape_tensor(pa.uint8(), [2, 2, 3])
    schema = pa.schema([("v", vector), ("image", picture), ("x", pa.int32())])
    assert parse({"concatenator": {"columns": "*"}}).transform.columns(schema, None) == ["v", "x"]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"standard_scaler": {"columns": ["agee"]}}, r"no column 'agee'.*age \(int64\)"),
        ({"standard_scaler": {"columns": ["sex"]}}, r"'sex' of type string"),
        ({"one_hot": {"columns": ["fare"]}}, r"'fare' of type double"),
        ({"concatenator": {"columns": ["day"]}}, r"'day' of type timestamp"),
    ],
)
def test_column_of_wrong_type_is_named(written: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        parse(written).transform.columns(SCHEMA, "label")


def test_star_without_match_is_refused() -> None:
    with pytest.raises(DataError, match="matches no column"):
        parse({"one_hot": {"columns": "*"}}).transform.columns(pa.schema([("x", pa.int64())]), None)


def test_label_encoder_without_label_is_refused() -> None:
    with pytest.raises(DataError, match="needs a label"):
        parse("label_encoder").transform.columns(SCHEMA, None)
