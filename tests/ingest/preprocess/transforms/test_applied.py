"""The effect of each transform on rows, and the messages about rows and columns that cannot be used."""

from __future__ import annotations

import datetime as dt
import io
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from penstock.errors import DataError, SpecError
from penstock.ingest.preprocess.chain import Chain, apply_transforms
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.problems import Origin
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transform_spec import FittedPreprocess, FittedTransform, TransformSpec
from penstock.ingest.spec import DataSpec
from penstock.usercode.capture import capture
from tests.ingest.preparing import Source, apply_chain, transform_table


def apply(table: pa.Table, step: Any, *states: ColumnState, **data: Any) -> pa.Table:
    """One fitted step."""
    transform = _transform(step, *states, **data)
    return apply_chain(transform, table)


def _transform(step: Any, *states: ColumnState, **data: Any) -> Chain:
    parsed = TransformSpec.model_validate(step)
    spec = DataSpec.model_validate({"format": "parquet", "train": "t", **data})
    return Chain(spec, [parsed], FittedPreprocess(steps=(FittedTransform(step=parsed, columns=states),)), {})


def user_transform(folder: Path, source: str, params: dict[str, Any] | None = None, **data: Any) -> Chain:
    """A map_batches step with the function `f` of `source`."""
    (folder / "user.py").write_text(f"import numpy as np\n{source}\n")
    step = TransformSpec.model_validate({"map_batches": {"function": "user.py:f", "params": params or {}}})
    spec = DataSpec.model_validate({"format": "parquet", "train": "t", **data})
    code = {"user.py:f": capture("user.py:f", folder)}
    return Chain(spec, [step], FittedPreprocess(steps=(FittedTransform(step=step),)), code)


def jpeg(height: int, width: int, *, orientation: int | None = None) -> bytes:
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 2] = 255
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", exif=exif, quality=95)
    return stream.getvalue()


# Steps without state.


def test_drop_rename_and_cast_change_columns() -> None:
    table = pa.table({"a": [1, 2], "b": [3, 4], "c": ["5", "6"]})
    result = transform_table(table, [{"drop": ["a"]}, {"rename": {"b": "x"}}, {"cast": {"x": "float32", "c": "int64"}}])
    assert result.to_pydict() == {"x": [3.0, 4.0], "c": [5, 6]}
    assert result.schema.field("x").type == pa.float32()


@pytest.mark.parametrize(
    "step", [{"drop": ["q"]}, {"rename": {"q": "r"}}, {"cast": {"q": "int64"}}, {"decode_image": {"column": "q"}}]
)
def test_transform_missing_column_lists_columns(step: Any) -> None:
    with pytest.raises(DataError, match=r"no column 'q' at this point; the rows have a .int64., b"):
        transform_table(pa.table({"a": [1], "b": [2]}), [step])


def test_rename_onto_other_column_is_refused() -> None:
    with pytest.raises(DataError, match="two columns the name 'b'"):
        transform_table(pa.table({"a": [1], "b": [2]}), [{"rename": {"a": "b"}}])


def test_cast_with_loss_names_file_row_and_value() -> None:
    with pytest.raises(DataError, match=r"part-0\.parquet, row 102 \(from 0\): a holds 'many'"):
        transform_table(pa.table({"a": ["1", "2", "many"]}), [{"cast": {"a": "int64"}}])


@pytest.mark.parametrize(("kind", "expected"), [("int64", 86400), ("float64", 86400.5)])
def test_cast_time_gives_seconds_since_1970(kind: str, expected: float) -> None:
    when = pa.array([dt.datetime(1970, 1, 2, 0, 0, 0, 500_000)], pa.timestamp("us"))
    assert transform_table(pa.table({"t": when}), [{"cast": {"t": kind}}])["t"].to_pylist() == [expected]
    day = pa.array([dt.date(1970, 1, 2)], pa.date32())
    assert transform_table(pa.table({"t": day}), [{"cast": {"t": kind}}])["t"].to_pylist() == [86400]


def test_concatenator_joins_numbers_and_vectors() -> None:
    table = pa.table({"y": [7, 8], "a": [1, 2], "v": [[3.0, 4.0], [5.0, 6.0]], "b": [True, False]})
    result = transform_table(table, [{"concatenator": {"columns": ["v", "a", "b"], "output": "x"}}], label="y")
    assert result.column_names == ["y", "x"]
    assert result["x"].type == pa.fixed_shape_tensor(pa.float32(), [4])
    assert result["x"].combine_chunks().to_numpy_ndarray().tolist() == [[3, 4, 1, 1], [5, 6, 2, 0]]


def test_column_that_does_not_fit_names_the_entry_of_the_file() -> None:
    table = pa.table({"x": [1], "z": [2], "day": pa.array([0], pa.date32())})
    for step, shown in (
        ({"columns": ["x", "day"]}, "cannot take column 'day' of type date32"),
        ({"columns": ["q"]}, "no column 'q'"),
    ):
        with pytest.raises(DataError, match=rf"^preprocess\[1\]\.concatenator.*{shown}"):
            transform_table(table, [{"drop": ["z"]}, {"concatenator": step}])


@pytest.mark.parametrize("steps", [[], [{"standard_scaler": {"columns": ["e"]}}], [{"one_hot": {"columns": ["e"]}}]])
def test_column_without_any_value_is_to_be_left_out(tmp_path: Path, steps: list[Any]) -> None:
    table = pa.table({"x": [1.0, 2.0], "e": pa.nulls(2)})
    with pytest.raises(DataError, match=r"'e' of type null|2 rows have no value in e, a column without any") as refused:
        Source.of(tmp_path, {"train/a.parquet": table}, steps).materialize()
    assert "leave it out (drop: [e]" in str(refused.value) or refused.value.next_step.startswith(
        "leave the column out (drop: [e]"
    )
    assert "data.invalid" not in str(refused.value), "no row would be left"


def test_concatenator_names_column_of_missing_value() -> None:
    table = pa.table({"a": [1.0, None, float("nan")], "b": [1, 1, 1]})
    with pytest.raises(DataError) as caught:
        transform_table(table, [{"concatenator": {"columns": ["a", "b"]}}])
    assert "1 row has a null in a; first: part-0.parquet, row 101" in str(caught.value)
    assert "1 row has NaN or an infinity in a; first: part-0.parquet, row 102" in str(caught.value)


def test_imputer_mean_of_rounded_integers_is_refused() -> None:
    with pytest.raises(DataError, match="imputer: column 'n' holds integers that a double would round"):
        transform_table(pa.table({"n": [9007199254740993, None, 3]}), [{"imputer": {"columns": ["n"]}}])


def test_imputer_constant_fills_nulls_and_nan() -> None:
    table = pa.table({"a": [1.0, None, float("nan")], "s": ["x", None, "y"]})
    steps = [
        {"imputer": {"columns": ["a"], "strategy": "constant", "fill_value": 9}},
        {"imputer": {"columns": ["s"], "strategy": "constant", "fill_value": "7"}},
        {"cast": {"s": "string"}},
        {"drop": ["s"]},
    ]
    assert transform_table(table, steps)["a"].to_pylist() == [1.0, 9.0, 9.0]
    with pytest.raises(DataError, match="'none' is not a value for column 'a' of type double"):
        transform_table(table, [{"imputer": {"columns": ["a"], "strategy": "constant", "fill_value": "none"}}])
    with pytest.raises(DataError, match=r"0\.5 is not a value for column 'n' of type int64"):
        transform_table(
            pa.table({"n": [1, None]}), [{"imputer": {"columns": ["n"], "strategy": "constant", "fill_value": 0.5}}]
        )
    for kind, fill in ((pa.float16(), 70000), (pa.float32(), 1e39), (pa.float32(), 2**24 + 1)):
        large = {"imputer": {"columns": ["n"], "strategy": "constant", "fill_value": fill}}
        with pytest.raises(DataError, match=re.escape(f"{fill} is not a value for column 'n'")):
            transform_table(pa.table({"n": pa.array([1, None], kind)}), [large], invalid="drop")
    with pytest.raises(DataError, match="-1 is not a value for column 'n' of type uint8"):
        negative = {"imputer": {"columns": ["n"], "strategy": "constant", "fill_value": -1}}
        transform_table(pa.table({"n": pa.array([1, None], pa.uint8())}), [negative])


# Steps with state.


@pytest.mark.parametrize("kind", ["standard_scaler", "min_max_scaler", "max_abs_scaler", "robust_scaler"])
def test_scaler_gives_float32_and_keeps_nulls(kind: str) -> None:
    state = ColumnState(column="a", center=1.0, scale=2.0)
    table = pa.table({"a": pa.array([1, 5, None]), "b": [1, 2, 3]})
    with pytest.raises(DataError, match=r"1 row has a null in a; first: part-0\.parquet, row 102"):
        apply(table, {kind: {"columns": ["a"]}}, state)
    result = apply(table.slice(0, 2), {kind: {"columns": ["a"]}}, state)
    assert result["a"].type == pa.float32()
    assert result.to_pydict() == {"a": [0.0, 2.0], "b": [1, 2]}


def test_scaler_of_vectors_is_refused(tmp_path: Path) -> None:
    vectors = pa.table({"x": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float64(), 2))})
    source = Source.of(tmp_path, {"train/a.parquet": vectors}, [{"standard_scaler": {"columns": ["x"]}}])
    with pytest.raises(DataError, match="standard_scaler cannot take column 'x'") as refused:
        source.fit()
    assert refused.value.next_step.startswith("it takes one number a row")


def test_one_hot_unseen_gives_zeros() -> None:
    state = ColumnState(column="c", categories=("blue", "red"))
    transform = _transform({"one_hot": {"columns": ["c"]}}, state)
    rows = transform.prepare(pa.table({"c": ["red", "green", "blue"]}), Origin.of_file("f", 0, 3))
    assert rows.table["c"].combine_chunks().to_numpy_ndarray().tolist() == [[0, 1], [0, 0], [1, 0]]
    assert rows.table["c"].type == pa.fixed_shape_tensor(pa.float32(), [2])
    assert rows.unseen == {"c": 1}
    assert rows.problems == []


@pytest.mark.parametrize("kind", ["ordinal", "label_encoder"])
def test_encoder_unseen_is_named_or_dropped(kind: str) -> None:
    step = {kind: {"columns": ["c"]} if kind == "ordinal" else {"column": "c"}}
    state = ColumnState(column="c", categories=("blue", "red"))
    table = pa.table({"c": ["red", "green", "blue", "pink"]})
    with pytest.raises(DataError, match=r"2 rows have a value in c that the train split.*row 101 \(from 0\): 'green'"):
        apply(table, step, state)
    transform = _transform(step, state, invalid="drop")
    rows = transform.prepare(table, Origin.of_file("f", 0, 4))
    assert rows.table["c"].to_pylist() == [1, 0]
    assert rows.table["c"].type == pa.int64()
    assert rows.origin.rows.tolist() == [0, 2]
    assert [(p.reason, p.rows) for p in rows.problems] == [("unknown category", 2)]


@pytest.mark.parametrize("categories", [(3, 5), (False, True), ("a", "b")])
def test_encoder_categories_keep_their_type(categories: tuple[Any, ...]) -> None:
    state = ColumnState.model_validate_json(ColumnState(column="c", categories=categories).model_dump_json())
    assert [type(value) for value in state.categories or ()] == [type(value) for value in categories]
    table = pa.table({"c": [categories[1], categories[0]]})
    assert apply(table, {"ordinal": {"columns": ["c"]}}, state)["c"].to_pylist() == [1, 0]


@pytest.mark.parametrize("kind", ["one_hot", "ordinal"])
def test_encoder_null_is_not_a_category(kind: str) -> None:
    state = ColumnState(column="c", categories=("a",))
    with pytest.raises(DataError, match="1 row has a null in c"):
        apply(pa.table({"c": ["a", None]}), {kind: {"columns": ["c"]}}, state)


@pytest.mark.parametrize(
    ("values", "dtype", "place"),
    [
        (pa.array([1, 16777217]), "float32", "row 101 .*'x' holds 16777217, which float32 makes 16777216"),
        (pa.array([1767225659.25, 0.1]), "float32", r"row 100 .*'x' holds 1767225659\.25, which float32 makes 1767225600"),
        (pa.array([1704067201.0, 0.1]), "float32", "row 100 .*'x' holds 1704067201, which float32 makes 1704067200"),
        (pa.array([[2, 3], [4, 2**24 + 3]]), "float32", "row 101 .*'x' holds 16777219"),
        (pa.array([0.1, 70000.5]), "float16", r"row 101 .*'x' holds 70000\.5, which float16 makes inf"),
        (pa.array([2**63 + 1025], pa.uint64()), "float64", "row 100 .*'x' holds 9223372036854776833"),
    ],
)
def test_concatenator_refuses_lossy_whole_numbers(values: pa.Array, dtype: str, place: str) -> None:
    step = {"concatenator": {"columns": ["x"], "dtype": dtype}}
    with pytest.raises(DataError, match=place) as caught:
        transform_table(pa.table({"x": values}), [step])
    assert "standard_scaler: {columns: [x]}" in caught.value.next_step
    transform_table(pa.table({"x": [0.1, 2.0**40, -16777216.0]}), [{"concatenator": {"columns": ["x"]}}])


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array([1000, 1500, 2000], pa.duration("ms")), "int64"),
        (pa.array([1000, 1500, 2000], pa.time32("ms")), "int64"),
        (pa.array([10, 2**33, 5], pa.timestamp("s")), "int32"),
        (pa.array([128, 1704067201, 256], pa.timestamp("s")), "float32"),
        (pa.array([5, 2**62, 6], pa.timestamp("us")), "int32"),
        (pa.array([5, 2**62, 6], pa.timestamp("s")), "float64"),
        (pa.array([5, 2**62, 6], pa.duration("s")), "int64"),
        (pa.array(["1", "1.5", "2"]), "int64"),
    ],
)
def test_cast_with_loss_names_row(values: pa.Array, kind: str) -> None:
    with pytest.raises(DataError, match=r"row 101 .*, which does not become \w+ without loss"):
        transform_table(pa.table({"t": values}), [{"cast": {"t": kind}}])


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        (pa.array([1500, -500], pa.duration("ms")), [1.5, -0.5]),
        (pa.array([3600], pa.time32("s")), [3600.0]),
        (pa.array([1_500_000_000], pa.time64("ns")), [1.5]),
    ],
)
def test_cast_duration_and_time_give_seconds(values: pa.Array, seconds: list[float]) -> None:
    assert transform_table(pa.table({"t": values}), [{"cast": {"t": "float32"}}])["t"].to_pylist() == seconds


# Images.


def test_decode_image_is_upright() -> None:
    table = pa.table({"image": [{"bytes": jpeg(20, 40, orientation=6), "path": "a.jpg"}]})
    pixels = transform_table(table, ["decode_image"])["image"].combine_chunks().to_numpy_ndarray()
    assert pixels.shape == (1, 40, 20, 3)
    assert pixels.dtype == np.uint8
    assert pixels[0, 2].mean() > 200
    assert pixels[0, -3].mean() < 50


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_decode_image_resizes_to_height_and_width(mode: str, channels: int) -> None:
    table = pa.table({"image": pa.array([jpeg(20, 40), jpeg(8, 8)], pa.binary())})
    result = transform_table(table, [{"decode_image": {"size": [10, 30], "mode": mode}}])
    assert result["image"].combine_chunks().to_numpy_ndarray().shape == (2, 10, 30, channels)


def test_decode_image_defaults_to_data_images() -> None:
    table = pa.table({"image": [{"bytes": jpeg(20, 40), "path": None}]})
    result = transform_table(table, images={"size": [4, 6], "mode": "L"})
    assert result["image"].combine_chunks().to_numpy_ndarray().shape == (1, 4, 6, 1)


def test_decode_image_two_sizes_message_has_size() -> None:
    table = pa.table({"image": pa.array([jpeg(20, 40), jpeg(8, 9)], pa.binary())})
    with pytest.raises(DataError, match=r"row 101 .*8x9.*20x40") as caught:
        transform_table(table, ["decode_image"])
    assert "decode_image: {column: image, size: [20, 40]}" in str(caught.value)


def test_decode_image_broken_is_named_or_dropped() -> None:
    table = pa.table({"image": pa.array([jpeg(8, 8), jpeg(8, 8)[:60], b"no image", None], pa.binary()), "label": [0, 1, 2, 3]})
    with pytest.raises(DataError) as caught:
        transform_table(table, ["decode_image"])
    assert "2 rows have an image in image that cannot be decoded; first: part-0.parquet, row 101" in str(caught.value)
    assert "1 row has a null in image; first: part-0.parquet, row 103" in str(caught.value)
    assert transform_table(table, ["decode_image"], invalid="drop")["label"].to_pylist() == [0]


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(
    ("pixels", "format", "deep"),
    [
        (np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16), "PNG", "I;16"),
        (np.linspace(0, 1, 64).reshape(8, 8).astype(np.float32), "TIFF", "F"),
        (np.arange(64, dtype=np.int32).reshape(8, 8), "TIFF", "I"),
    ],
)
def test_decode_image_more_than_8_bits_is_refused(pixels: np.ndarray, format: str, deep: str, mode: str) -> None:
    table = pa.table({"image": pa.array([jpeg(8, 8), encoded(pixels, format)], pa.binary())})
    with pytest.raises(DataError, match=rf"row 101 .*mode {deep}: .* more than 8 bits"):
        transform_table(table, [{"decode_image": {"mode": mode}}], invalid="drop")


def encoded(pixels: np.ndarray, format: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format)
    return stream.getvalue()


def test_decode_image_range_scales_only_deep_images() -> None:
    depth = np.array([[0, 257, 32768], [65535, 1000, 128]], np.uint16)
    floats = np.array([[-7.0, 0.0, 0.5], [1.0, 9.0, np.inf]], np.float32)
    grey = np.array([[0, 1, 2], [3, 128, 255]], np.uint8)
    table = pa.table({"image": pa.array([encoded(depth, "PNG"), encoded(grey, "PNG")], pa.binary())})
    found = transform_table(table, [{"decode_image": {"mode": "L", "range": [0, 65535]}}])["image"].to_pylist()
    assert np.array_equal(np.reshape(found, (2, 2, 3)), [[[0, 1, 128], [255, 4, 0]], grey])
    table = pa.table({"image": pa.array([encoded(floats, "TIFF"), encoded(floats * np.nan, "TIFF")], pa.binary())})
    found = transform_table(table, ["decode_image"], invalid="drop", images={"mode": "RGB", "range": [0, 1]})[
        "image"
    ].to_pylist()
    assert np.array_equal(np.reshape(found, (1, 2, 3, 3))[..., 2], [[[0, 0, 128], [255, 255, 255]]])
    with pytest.raises(DataError, match="cannot be decoded"):
        transform_table(table, ["decode_image"], images={"range": [0, 1]})
    with pytest.raises(SpecError, match="keep: encoded is for images of 8 bits"):
        transform_table(table, [{"decode_image": {"keep": "encoded"}}], images={"range": [0, 1]})


def test_decode_image_refuses_other_programs() -> None:
    table = pa.table({"image": [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n%%EndComments\n"]})
    with pytest.raises(DataError, match="not a JPEG, PNG, BMP, WebP, TIFF or GIF image"):
        transform_table(table, ["decode_image"])


def test_decode_image_without_images_is_refused() -> None:
    with pytest.raises(DataError, match="'x' has type int64; it takes bytes"):
        transform_table(pa.table({"x": [1]}), [{"decode_image": {"column": "x"}}])


# User functions.


def test_map_batches_gets_and_returns_numpy(tmp_path: Path) -> None:
    source = """
def f(batch, k):
    assert batch["s"].dtype == object and batch["s"][0] == "ab" and batch["s"][1] is None
    assert batch["v"].shape == (2, 3) and batch["v"].dtype == np.float32
    assert batch["n"].dtype == np.float64 and np.isnan(batch["n"][1])
    assert batch["i"].dtype == np.int32
    assert list(batch["ragged"][1]) == [2, 3]
    assert batch["t"].dtype.kind == "M"
    batch["i"] += 1
    return {"i": batch["i"] * k, "v": batch["v"].reshape(2, 1, 3), "big": batch["i"] > 2}
"""
    table = pa.table(
        {
            "s": ["ab", None],
            "v": pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.float32(), 3)),
            "n": pa.array([1, None]),
            "i": pa.array([1, 2], pa.int32()),
            "ragged": [[1], [2, 3]],
            "t": pa.array([0, 1], pa.timestamp("s")),
        }
    )
    result = apply_chain(user_transform(tmp_path, source, {"k": 10}), table)
    assert result["i"].to_pylist() == [20, 30]
    assert result["v"].combine_chunks().to_numpy_ndarray().tolist() == [[[1, 2, 3]], [[4, 5, 6]]]
    assert result["big"].to_pylist() == [0, 1]
    assert table["i"].to_pylist() == [1, 2]


def _run_function(rows: Rows, folder: Path, body: str) -> None:
    """A map_batches step alone, without what all columns must be after the last step."""
    (folder / "user.py").write_text(f"import numpy as np\ndef f(batch):\n    {body}\n")
    step = TransformSpec.model_validate({"map_batches": "user.py:f"})
    data = DataSpec(format="parquet", train="t")
    apply_transforms(rows, [FittedTransform(step=step)], data, {"user.py:f": capture("user.py:f", folder).load()})


UNTOUCHED = {
    "ids": pa.array([2**53 + 1, None, 2**53 + 3]),
    "flags": pa.array([True, None, False]),
    "plain_flags": pa.array([True, False, True]),
    "tokens": pa.array([[1], [], [2, 3]], pa.list_(pa.uint16())),
    "floats": pa.array([[0.1], None, [0.2, 0.3]], pa.list_(pa.float32())),
    "fixed": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.uint8(), 2)),
    "when": pa.array([0, None, 1], pa.timestamp("s", "Europe/Berlin")),
    "text": pa.array(["a", None, "b"], pa.large_string()),
    "struct": pa.array([{"a": 1}, None, {"a": None}]),
    "money": pa.array([None, 1, 2]).cast(pa.decimal128(21, 2)),
}


@pytest.mark.parametrize(
    "body", ["return batch", 'return {**batch, "new": np.arange(3)}', "return {k: batch[k] for k in batch}"]
)
def test_map_batches_keeps_untouched_columns(tmp_path: Path, body: str) -> None:
    rows = Rows(pa.table(UNTOUCHED), Origin.of_file("f", 0, 3))
    _run_function(rows, tmp_path, body)
    for name, values in UNTOUCHED.items():
        assert rows.column(name).equals(values), name


def test_map_batches_may_change_in_place(tmp_path: Path) -> None:
    body = 'batch["n"][0] = 7; batch["text"][2] = "c"; batch["tokens"][2][1] = 9; return batch'
    rows = Rows(pa.table({**UNTOUCHED, "n": pa.array([2**53, None, -3])}), Origin.of_file("f", 0, 3))
    _run_function(rows, tmp_path, body)
    assert rows.column("n").to_pylist()[::2] == [7.0, -3.0]
    assert rows.column("text").to_pylist() == ["a", None, "c"]
    assert rows.column("tokens").to_pylist() == [[1], [], [2, 9]]
    assert rows.column("tokens").type.value_type == pa.uint16()


@pytest.mark.parametrize("body", ['batch["ids"][0] = 7; return batch', 'return {"ids": batch["ids"].copy()}'])
def test_map_batches_refuses_change_of_rounded_integers(tmp_path: Path, body: str) -> None:
    for ids, place in ((UNTOUCHED["ids"], "row 10 .* holds 9007199254740993"), (pa.array([None, 2**63], pa.uint64()), "")):
        rows = Rows(pa.table({"ids": ids}), Origin.of_file("f", 10, len(ids)))
        with pytest.raises(DataError, match=f"user.py:f changed column 'ids', which becomes floats.*{place}"):
            _run_function(rows, tmp_path, body)


def test_map_batches_text_left_over_is_refused(tmp_path: Path) -> None:
    transform = user_transform(tmp_path, 'def f(batch):\n    return {"word": np.array(["a", "b"])}')
    with pytest.raises(DataError, match="'word' has type string; after all transforms"):
        apply_chain(transform, pa.table({"x": [1, 2]}))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('return {"x": batch["x"][:2]}', r"user\.py:f: column 'x' came back with 2 rows for 3"),
        ('return {"x": 3}', "came back with a scalar"),
        ("return None", "returned NoneType; it must return a dict"),
        ('return batch["y"]', r"user\.py:f raised KeyError: 'y' \(.*user\.py, line 3\)"),
        ('return {"x": np.array([1j, 2j, 3j])}', "dtype complex128, which cannot be kept"),
        ('return {"x": [[1], [1, 2], [3]]}', "is not an array of one shape"),
        ('return {**batch, "_keep": [0, 2, 1]}', "returned '_keep' of dtype int64; it must hold True or False"),
        ('return {**batch, "_keep": ["False"] * 3}', "'_keep' of dtype <U5"),
    ],
)
def test_map_batches_wrong_result_names_function(tmp_path: Path, body: str, said: str) -> None:
    transform = user_transform(tmp_path, f"def f(batch):\n    {body}")
    with pytest.raises(DataError, match=said) as refused:
        apply_chain(transform, pa.table({"x": [1, 2, 3]}), "part-7.parquet", 40)
    assert refused.value.next_step.startswith(("correct user.py:f", "to leave rows out"))


def test_map_batches_failure_names_rows(tmp_path: Path) -> None:
    transform = user_transform(tmp_path, "def f(batch):\n    return 1 / 0")
    with pytest.raises(DataError, match=r"part-7\.parquet, row 40 \(from 0\) and the 2 rows after it"):
        apply_chain(transform, pa.table({"x": [1, 2, 3]}), "part-7.parquet", 40)


def test_map_batches_keep_filters_rows(tmp_path: Path) -> None:
    transform = user_transform(tmp_path, 'def f(batch):\n    return {**batch, "_keep": batch["x"] != 2}')
    rows = transform.prepare(pa.table({"x": [1, 2, 3]}), Origin.of_file("f", 10, 3))
    assert rows.table.to_pydict() == {"x": [1, 3]}
    assert rows.origin.rows.tolist() == [10, 12]
    assert rows.filtered == {"map_batches": 1}


@pytest.mark.parametrize(("label", "kind"), [(-1, pa.int64()), (250_000, pa.int64()), (2**63, pa.uint64())])
def test_label_not_a_class_index_is_never_dropped(label: int, kind: pa.DataType) -> None:
    table = pa.table({"x": [1.0, None, 2.0], "y": pa.array([1, 1, label], kind)})
    with pytest.raises(DataError, match=rf"row 102 .*: {label}") as caught:
        transform_table(table, label="y", invalid="drop")
    assert "label_encoder" in caught.value.next_step and "data.invalid" not in caught.value.next_step


# What is left after all transforms.


@pytest.mark.parametrize(
    ("values", "dtype", "shape"),
    [
        (pa.array([True, False]), "uint8", []),
        (pa.array([1, 2], pa.int16()), "int16", []),
        (pa.array([b"ab", b"cd"], pa.binary(2)), "uint8", [2]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.uint8())), "uint8", [2]),
        (pa.array([[1, 2], [3, 4]], pa.large_list(pa.float64())), "double", [2]),
        (pa.array([[[1, 2, 3], [4, 5, 6]]] * 2, pa.list_(pa.list_(pa.int64(), 3))), "int64", [2, 3]),
        (pa.array([[True], [False]], pa.list_(pa.bool_(), 1)), "uint8", [1]),
    ],
)
def test_columns_get_one_shape(values: pa.Array, dtype: str, shape: list[int]) -> None:
    padded = pa.concat_arrays([values, values]).slice(2)  # what is before a slice must not come back
    kind = transform_table(pa.table({"x": padded}))["x"].type
    expected = pa.type_for_alias(dtype)
    assert kind == (pa.fixed_shape_tensor(expected, shape) if shape else expected)
    flat = np.array(padded.to_pylist() if dtype != "uint8" or shape != [2] else [list(v) for v in padded.to_pylist()])
    column = transform_table(pa.table({"x": padded}))["x"].combine_chunks()
    result = column.to_numpy_ndarray() if shape else column.to_numpy()
    assert result.tolist() == flat.astype(result.dtype).tolist()


@pytest.mark.parametrize("inner", [pa.list_(pa.int64()), pa.list_(pa.int64(), 1)])
def test_nested_null_is_list_of_other_length(inner: pa.DataType) -> None:
    with pytest.raises(DataError, match=r"unequal length: part-0\.parquet, row 101"):
        transform_table(pa.table({"x": pa.array([[[1], [2]], [[3], None]], pa.list_(inner))}))


def test_unequal_lists_name_first_row() -> None:
    with pytest.raises(DataError, match=r"'x' holds lists of unequal length: part-0\.parquet, row 102 .*has 1 .* 2"):
        transform_table(pa.table({"x": [[1, 2], [3, 4], [5], [6]]}))


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        (pa.array(["a"]), "one_hot or ordinal: {columns: [x]}"),
        (pa.array([0], pa.timestamp("s")), "cast: {x: float64}"),
        (pa.array([0], pa.date32()), "cast: {x: float64}"),
        (pa.array([1]).cast(pa.decimal128(21, 2)), "cast: {x: float64}"),
        (pa.array([1], pa.duration("s")), "cast: {x: float64}"),
        (pa.array([1], pa.time64("us")), "cast: {x: float64}"),
        (pa.array([["a"], ["b", "c"]]), "map_batches"),
        (pa.array([[[("a", 1)]]], pa.list_(pa.map_(pa.string(), pa.int64()))), "map_batches"),
        (pa.array([b"abc"]), "decode_image: {column: x}"),
        (pa.array([{"a": 1}]), "drop: [x]"),
        (pa.array([["a"]]), "drop: [x]"),
    ],
)
def test_column_without_numbers_names_transform(values: pa.Array, advice: str) -> None:
    with pytest.raises(DataError, match="'x' has type") as caught:
        transform_table(pa.table({"x": values}))
    assert advice in str(caught.value)


def test_decimals_become_floats() -> None:
    values = pa.array([1, 2]).cast(pa.decimal128(21, 2))
    assert transform_table(pa.table({"x": values}), [{"cast": {"x": "float64"}}])["x"].to_pylist() == [1.0, 2.0]


def test_text_label_advises_label_encoder() -> None:
    with pytest.raises(DataError, match="the label 'y' is text") as caught:
        transform_table(pa.table({"y": ["cat"]}), label="y")
    assert "label_encoder" in str(caught.value)


def test_label_removed_by_transforms_is_refused() -> None:
    with pytest.raises(SpecError, match="there is no column 'y' after the transforms; the rows have x"):
        transform_table(pa.table({"x": [1], "y": [1]}), [{"drop": ["y"]}], label="y")
    with pytest.raises(SpecError, match="did you mean 'price'"):
        transform_table(pa.table({"price": [1]}), [], label="prize")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (pa.array([1.0, None, None]), r"2 rows have a null in x; first: part-0\.parquet, row 101"),
        (pa.array([1.0, 2.0, float("nan")]), r"1 row has NaN or an infinity in x; first: part-0\.parquet, row 102"),
        (pa.array([float("-inf"), 2.0, 3.0]), r"NaN or an infinity in x; first: part-0\.parquet, row 100"),
        (pa.array([1.0, float("inf"), 3.0], pa.float32()).cast(pa.float16()), "row 101"),
        (pa.array([[1.0, 2.0], [float("nan"), 2.0], [1.0, 1.0]], pa.list_(pa.float32(), 2)), "row 101"),
        (pa.array([[1, 2], [1, None], [1, 1]], pa.list_(pa.int64(), 2)), "1 row has a null in x.*row 101"),
        (pa.array([[1, 2], None, [1, 1]], pa.list_(pa.int64())), "1 row has a null in x.*row 101"),
    ],
)
def test_missing_value_names_count_file_and_row(values: pa.Array, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        transform_table(pa.table({"x": values, "y": [0, 1, 2]}))
    assert str(caught.value).startswith("data.invalid: error")
    assert "data.invalid: drop" in str(caught.value)
    kept = transform_table(pa.table({"x": values, "y": [0, 1, 2]}), invalid="drop")
    assert 0 < kept.num_rows < 3


def test_problems_are_joined_and_rows_count_once() -> None:
    table = pa.table({"a": [None, 1.0, 1.0], "b": [None, None, 1.0]})
    with pytest.raises(DataError) as caught:
        transform_table(table)
    assert "1 row has a null in a" in str(caught.value)
    assert "1 row has a null in b; first: part-0.parquet, row 101" in str(caught.value)


@pytest.mark.parametrize("bad", [-1, 100_000])
def test_integer_label_must_be_class_index(bad: int) -> None:
    table = pa.table({"y": pa.array([0, bad, 3], pa.int32())})
    with pytest.raises(DataError, match=rf"1 row has a label y that is not a class.*row 101 \(from 0\): {bad}") as caught:
        transform_table(table, label="y")
    assert "cast: {y: float32}" in str(caught.value)
    kept = transform_table(table.slice(2), label="y")
    assert kept["y"].type == pa.int64()
    assert kept["y"].to_pylist() == [3]


def test_float_label_may_be_any_finite() -> None:
    assert transform_table(pa.table({"y": [-2.5, 1e9]}), label="y")["y"].to_pylist() == [-2.5, 1e9]


def test_provenance_column_names_are_refused() -> None:
    with pytest.raises(DataError, match="'_row' is taken"):
        transform_table(pa.table({"_row": [1]}))


def test_all_rows_left_out_is_not_an_error() -> None:
    assert transform_table(pa.table({"x": pa.array([None], pa.int64())}), invalid="drop").num_rows == 0


def test_chain_refuses_state_of_other_transforms() -> None:
    step = TransformSpec.model_validate({"drop": ["a"]})
    with pytest.raises(ValueError, match="other transforms"):
        Chain(DataSpec(format="csv", train="t"), [step], FittedPreprocess(steps=()), {})


def test_scaler_constant_divides_by_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = ColumnState(column="a", center=3.0, scale=1.0)
        assert apply(pa.table({"a": [3, 3]}), {"standard_scaler": {"columns": ["a"]}}, state)["a"].to_pylist() == [0, 0]


def test_column_without_name_refused_unless_dropped() -> None:
    rows = pa.table({"": [0, 1], "x": [0.5, 1.5]})
    with pytest.raises(DataError, match="a column has no name") as refused:
        transform_table(rows)
    assert 'drop: [""]' in refused.value.next_step
    assert transform_table(rows, [{"drop": [""]}]).column_names == ["x"]
