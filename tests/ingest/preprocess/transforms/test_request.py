"""A request gives what a table gives, to the bit: the same columns, dtypes, nulls and errors, whichever rows it holds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import DataError
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.transform_spec import TransformSpec
from penstock.ingest.preprocess.transforms.request import Request, request_of, schema_of, table_of
from penstock.ingest.preprocess.transforms.transform import Transform
from penstock.ingest.spec import DataSpec

DATA = DataSpec(format="csv", train="t", label="label")

_WORDS = st.sampled_from(["a", "b", "ü", "", "7"])
_REAL = st.just(math.nan) | st.sampled_from([0.0, -0.0, 1.5, -3.25, 7.0, 1e9, math.inf]) | st.floats(-1e6, 1e6)
_SINGLE = st.floats(-1e6, 1e6, width=32) | st.just(math.nan)
_SMALL = st.integers(-3, 5) | st.integers(-128, 127)
_VALUES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "i8": (pa.int8(), _SMALL),
    "i32": (pa.int32(), _SMALL | st.integers(-(2**31), 2**31 - 1)),
    "i64": (pa.int64(), _SMALL | st.integers(-(2**63), 2**63 - 1)),
    "u64": (pa.uint64(), st.integers(0, 4) | st.integers(0, 2**64 - 1)),
    "f16": (pa.float16(), st.floats(-100, 100, width=16)),
    "f32": (pa.float32(), _SINGLE),
    "f64": (pa.float64(), _REAL),
    "b": (pa.bool_(), st.booleans()),
    "s": (pa.string(), _WORDS),
    "label": (pa.string(), _WORDS),
    "v": (pa.list_(pa.float32(), 2), st.lists(_SINGLE, min_size=2, max_size=2)),
    "r": (pa.list_(pa.int64()), st.lists(_SMALL, max_size=3)),
    "t": (pa.timestamp("us"), st.integers(0, 10**15)),
}
NAMES = [*_VALUES, "absent"]


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """One to three rows of columns of every type, some values null; vectors as tensors, if they are whole."""
    rows, gaps = draw(st.integers(1, 3)), draw(st.booleans())
    columns: dict[str, pa.Array] = {}
    for name, (kind, values) in _VALUES.items():
        held = draw(st.lists(st.none() | values | values if gaps else values, min_size=rows, max_size=rows))
        column = pa.array([np.float16(v) if name == "f16" and v is not None else v for v in held], kind)
        if name == "v" and not column.null_count:
            column = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), [2]), column)
        columns[name] = column
    return pa.table(columns)


def columns_of(*names: str) -> st.SearchStrategy[list[str]]:
    """Some of the columns; mostly those that the transform takes."""
    usual = st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)
    return usual | usual | usual | st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)


_NUMBERS = ("i8", "i32", "i64", "u64", "f16", "f32", "f64", "b")
_SCALE = st.floats(1e-3, 1e3)
_CATEGORIES = {
    "s": st.lists(_WORDS, min_size=1, unique=True).map(sorted),
    "i64": st.lists(_SMALL, min_size=1, max_size=9, unique=True).map(sorted),
    "b": st.just([False, True]) | st.just([True]),
}
_FILL = _WORDS | _SMALL | st.booleans() | st.floats(-100, 100)


def categories(name: str) -> st.SearchStrategy[list[Any]]:
    """Mostly of the column's type."""
    usual = _CATEGORIES.get("s" if name == "label" else name, _CATEGORIES["i64"])
    return usual | usual | st.one_of(*_CATEGORIES.values())


def fill(name: str) -> st.SearchStrategy[Any]:
    """Mostly of the column's type."""
    usual = _WORDS if name == "s" else st.booleans() if name == "b" else st.integers(0, 5)
    return usual | usual | _FILL


@st.composite
def scalers(draw: st.DrawFn) -> tuple[Any, list[ColumnState]]:
    kind = draw(st.sampled_from(["standard_scaler", "min_max_scaler", "max_abs_scaler", "robust_scaler"]))
    names = draw(columns_of(*_NUMBERS))
    states = [ColumnState(column=name, center=draw(st.floats(-1e3, 1e3)), scale=draw(_SCALE)) for name in names]
    return {kind: {"columns": names}}, states


@st.composite
def encoders(draw: st.DrawFn, kind: str) -> tuple[Any, list[ColumnState]]:
    names = draw(columns_of("i8", "i64", "b", "s"))
    unknown = draw(st.sampled_from([{}, {"unknown": "error"}, {"unknown": "ignore"}, {"unknown": "code"}]))
    return {kind: {"columns": names, **unknown}}, [
        ColumnState(column=name, categories=tuple(draw(categories(name)))) for name in names
    ]


@st.composite
def powers(draw: st.DrawFn) -> tuple[Any, list[ColumnState]]:
    names, method = draw(columns_of(*_NUMBERS)), draw(st.sampled_from(["yeo_johnson", "box_cox"]))
    power = st.floats(-2, 2).map(lambda found: {"lambda": found})
    states = [ColumnState(column=name, center=1.0, scale=draw(_SCALE), more=draw(power)) for name in names]
    return {"power": {"columns": names, "method": method}}, states


@st.composite
def quantiles(draw: st.DrawFn) -> tuple[Any, list[ColumnState]]:
    names, output = draw(columns_of(*_NUMBERS)), draw(st.sampled_from(["uniform", "normal"]))
    knots = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=5).map(lambda found: tuple(sorted(found)))
    return {"quantile": {"columns": names, "output": output}}, [ColumnState(column=n, knots=draw(knots)) for n in names]


@st.composite
def label_encoders(draw: st.DrawFn) -> tuple[Any, list[ColumnState]]:
    name = draw(st.sampled_from(["label", "s", "i64"]))
    return {"label_encoder": {"column": name}}, [ColumnState(column=name, categories=tuple(draw(categories(name))))]


@st.composite
def imputers(draw: st.DrawFn) -> tuple[Any, list[ColumnState]]:
    names = draw(columns_of("f32", "f64", "i64", "b", "s"))
    strategy = draw(st.sampled_from(["mean", "most_frequent", "constant"]))
    if strategy == "constant":
        columns = draw(st.just(names) | st.just("*"))
        return {"imputer": {"columns": columns, "strategy": strategy, "fill_value": draw(fill(names[0]))}}, []
    states = [ColumnState(column=n, fill=draw(st.floats(-100, 100) if strategy == "mean" else fill(n))) for n in names]
    return {"imputer": {"columns": names, "strategy": strategy}}, states


def unfitted(kind: str, options: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, list[ColumnState]]]:
    return options.map(lambda held: ({kind: held}, []))


_TYPES = st.sampled_from(
    ["int8", "int64", "uint8", "uint64", "float16", "float32", "float64", "bool", "string", "timestamp[s]"]
)
STEPS = {
    "scalers": scalers(),
    "distribution": powers() | quantiles(),
    "imputer": imputers(),
    "one_hot": encoders("one_hot"),
    "ordinal": encoders("ordinal"),
    "label_encoder": label_encoders(),
    "concatenator": unfitted(
        "concatenator",
        st.fixed_dictionaries(
            {
                "columns": columns_of("i8", "i64", "f32", "f64", "b", "v") | st.just("*"),
                "output": st.sampled_from(["features", "f32", "s"]),
                "dtype": st.sampled_from(["float32", "float64", "float16"]),
            }
        ),
    ),
    "cast": unfitted("cast", st.dictionaries(st.sampled_from(NAMES), _TYPES, min_size=1, max_size=2)),
    "rename": unfitted(
        "rename", st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["x", "y", "s"]), min_size=1, max_size=2)
    ),
    "drop": unfitted("drop", columns_of(*_VALUES)),
    "null_mask": unfitted("null_mask", columns_of(*_NUMBERS).map(lambda names: {"columns": names})),
    "ragged": unfitted("ragged", columns_of("r").map(lambda names: {"columns": names})),
}


def outcome(request: Request) -> dict[str, Any]:
    """The columns as something that compares to the bit."""
    return {name: (type(values), *_content(values)) for name, values in request.items()}


def _content(values: Any) -> tuple[Any, ...]:
    if isinstance(values, pa.Array):
        return (values.type, str(values))
    if isinstance(values, np.ma.MaskedArray):
        mask = np.ma.getmaskarray(values)
        return (values.dtype, mask.tolist(), values.data[~mask].tobytes())
    return (values.dtype, values.shape, values.tolist() if values.dtype == object else values.tobytes())


def tried(transform: Transform[Any], form: Any, request: Request, states: list[ColumnState]) -> Any:
    try:
        with np.errstate(over="ignore"):
            return outcome(form(transform, request, states, DATA, {}))
    except (DataError, pa.ArrowException, OverflowError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", STEPS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_request_gives_what_a_table_gives(name: str, data: st.DataObject) -> None:
    written, states = data.draw(STEPS[name])
    transform = TransformSpec.model_validate(written).transform
    request = request_of(data.draw(tables()))
    before = outcome(request)
    assert tried(transform, type(transform).apply_request, request, states) == tried(
        transform, Transform.apply_request, request, states
    )
    assert outcome(request) == before


@pytest.mark.parametrize("written", ["standard_scaler", "mean", "most_frequent", "constant", "null_mask"])
@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.bool_()], ids=str)
def test_nulls_and_nan_of_every_type_of_number_are_treated_alike(kind: pa.DataType, written: str) -> None:
    floats = [1.0, None, math.nan, math.inf, 0.0] if pa.types.is_floating(kind) else [1.0, None, 0.0]
    state = ColumnState(column="x", center=0.5, scale=3.0, fill=0.5 if written == "mean" else True if kind == pa.bool_() else 1)
    options: dict[str, Any] = {"columns": ["x"]}
    if written in ("mean", "most_frequent", "constant"):
        options |= {"strategy": written} | ({"fill_value": state.fill} if written == "constant" else {})
    name = "imputer" if "strategy" in options else written
    transform = TransformSpec.model_validate({name: options}).transform
    states = [] if written in ("constant", "null_mask") else [state]
    request = request_of(pa.table({"x": pa.array(floats).cast(kind)}))
    made = tried(transform, type(transform).apply_request, request, states)
    assert made == tried(transform, Transform.apply_request, request, states)
    assert isinstance(made, dict) or kind == pa.float16()  # Arrow finds no NaN among half floats


@settings(deadline=None)
@given(table=tables())
def test_a_table_comes_back_from_the_form_of_a_request(table: pa.Table) -> None:
    back = table_of(request_of(table))
    assert back.schema == table.schema == schema_of(request_of(table))
    assert str(back) == str(table)


def test_a_request_without_the_label_passes_the_label_encoder() -> None:
    step = TransformSpec.model_validate("label_encoder").transform
    request: Request = {"x": np.array([1.0])}
    assert step.apply_request(request, [ColumnState(column="label", categories=("a",))], DATA, {}) == request


def test_a_row_that_cannot_be_used_is_named_by_its_place_in_the_request() -> None:
    step = TransformSpec.model_validate({"ordinal": {"columns": ["s"]}}).transform
    request: Request = {"s": np.array(["a", "q"], object)}
    with pytest.raises(DataError, match=r"the request, row 1 \(from 0\): 'q'") as caught:
        step.apply_request(request, [ColumnState(column="s", categories=("a",))], DATA, {})
    assert "data.invalid" not in str(caught.value)


def test_a_function_that_leaves_out_a_row_of_a_request_is_refused() -> None:
    step = TransformSpec.model_validate({"map_batches": "user.py:f"}).transform
    with pytest.raises(DataError, match="leaves out 1 rows of the request"):
        functions = {"user.py:f": lambda batch: {**batch, "_keep": batch["x"] > 1}}
        step.apply_request({"x": np.array([1.0, 2.0])}, [], DATA, functions)
