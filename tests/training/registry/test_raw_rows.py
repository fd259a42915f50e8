"""Raw rows become what the train split became: the same columns to the bit, together or alone, and bad ones are reported."""

from __future__ import annotations

import datetime as dt
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given as given_by
from hypothesis import settings
from hypothesis import strategies as st
from PIL import Image

from penstock.errors import DataError
from penstock.ingest.feed.cached import open_cached_feed
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.preprocess.chain import Chain, split_rows
from penstock.ingest.preprocess.problems import Origin
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.training.registry.given_rows import given_rows, raw_table
from penstock.training.registry.loaded_model import _batches_of
from penstock.training.registry.raw_rows import RawForm, RawRows, raw_form
from tests.ingest.preparing import Source

ROWS = 60
HELD_OUT = {"validation": None, "test": {"fraction": 0.4}, "label": "kind"}


def table_source(folder: Path) -> Source:
    """Every kind of column of a table: nulls that are filled or marked, a category that train lacks, one that is dropped."""
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "id": [f"r{row}" for row in range(ROWS)],
            "age": pa.array([None if row % 7 == 0 else row for row in range(ROWS)], pa.int64()),
            "height": pa.array([None if row % 9 == 0 else row / 3 for row in range(ROWS)], pa.float32()),
            "town": [("Ulm", "Bonn", f"only {row}")[row % 3] for row in range(ROWS)],
            "weight": rng.random(ROWS),
            "kind": [("no", "yes")[row % 2] for row in range(ROWS)],
        }
    )
    steps = [
        {"drop": ["id"]},
        {"rename": {"weight": "mass"}},
        {"imputer": {"columns": ["age"]}},
        {"imputer": {"columns": ["height"]}},
        {"one_hot": {"columns": ["town"]}},
        {"standard_scaler": {"columns": ["age", "mass"]}},
        {"concatenator": {"columns": ["age", "mass", "town"]}},
        "label_encoder",
    ]
    return Source.of(folder, {"train/0.parquet": table}, steps, **{**HELD_OUT, "test": {"fraction": 0.4, "by": "id"}})


def lists_source(folder: Path) -> Source:
    """Lists of unequal length in both forms, encoded images, and user code that needs the label's column."""
    rng = np.random.default_rng(1)
    rows = []
    for row in range(ROWS):
        stream = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (6, 6, 3), np.uint8)).save(stream, "PNG")
        picture = {"bytes": stream.getvalue(), "path": f"{row}.png"}
        tokens = rng.integers(0, 9, row % 5).tolist()
        rows.append({"tokens": tokens, "marks": tokens[:2], "picture": picture, "kept": picture, "kind": row % 3})
    (folder / "code.py").parent.mkdir(parents=True, exist_ok=True)
    (folder / "code.py").write_text("def shifted(batch):\n    return {**batch, 'kind': batch['kind'] * 1}\n")
    steps = [
        {"map_batches": "code.py:shifted"},
        {"ragged": {"columns": ["tokens"], "pad_value": 9}},
        {"ragged": {"columns": ["marks"], "batch": "packed", "dtype": "int32"}},
        {"decode_image": {"column": "kept", "keep": "encoded"}},
    ]
    return Source.of(folder, {"train/0.parquet": pa.Table.from_pylist(rows)}, steps, **HELD_OUT)


def images_source(folder: Path) -> Source:
    """Files in class folders: the label is a folder's name, the path no feature."""
    rng = np.random.default_rng(2)
    files = {}
    for row in range(ROWS // 2):
        stream = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (5 + row % 2, 6, 3), np.uint8)).save(stream, "JPEG")
        files[f"train/{('cat', 'dog')[row % 2]}/{row}.jpg"] = stream.getvalue()
    data = {"format": "images", "images": {"size": [4, 4]}, "label": "label", "test": {"fraction": 0.4}}
    return Source.of(folder, files, ["label_encoder"], **data)


def text_source(folder: Path) -> Source:
    """Text that user code turns into windows of tokens."""
    (folder / "code.py").parent.mkdir(parents=True, exist_ok=True)
    body = "return {'tokens': np.stack([list(map(ord, text)) for text in batch['text']])}"
    code = f"import numpy as np\n\ndef tokens(batch):\n    {body}\n"
    (folder / "code.py").write_text(code)
    text = "".join(chr(97 + number * number % 26) for number in range(ROWS * 8))
    data = {"format": "text", "text": {"rows": "chunk", "chunk_chars": 8}, "test": {"fraction": 0.4}}
    return Source.of(folder, {"train/a.txt": text}, [{"map_batches": "code.py:tokens"}], **data)


SOURCES = {"table": table_source, "lists": lists_source, "images": images_source, "text": text_source}


class Made:
    """A prepared source, the raw rows of its test split, and what prepares such rows as a model that was registered would."""

    def __init__(self, source: Source) -> None:
        self.source = source
        fitted = self.fitted = source.fit()
        self.manifest: DatasetManifest = source.materialize(fitted=fitted)
        snapshot = source.snapshot()
        parts: dict[str, list[pa.Table]] = {"train": [], "test": []}
        for split, table, _ in split_rows(source.data, snapshot, snapshot.files, 4096):
            parts[split].append(table)
        self.test = pa.concat_tables(parts["test"])
        form = raw_form(source.data, fitted, source.code, parts["train"][0])
        self.raw = RawRows(RawForm.model_validate_json(form.model_dump_json()), self.manifest.feed_schema)

    def table(self, given: Any) -> tuple[pa.Table, dict[int, str]]:
        return raw_table(given_rows(given), self.raw.schema, self.raw.form.unneeded)


@pytest.fixture(scope="module", params=SOURCES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(SOURCES[request.param](tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(table_source(tmp_path_factory.mktemp("people")))


def contents(table: pa.Table) -> dict[str, list[Any]]:
    storages = {name: table.column(name).combine_chunks() for name in table.column_names}
    return {name: getattr(values, "storage", values).to_pylist() for name, values in storages.items()}


def test_raw_rows_equal_materialized_rows(made: Made) -> None:
    unlabelled = made.test.drop_columns([name for name in made.raw.form.unneeded if name in made.test.column_names])
    table, problems = made.table(unlabelled)
    ready = made.raw.prepare(table)
    assert not problems and not ready.problems and ready.rows.tolist() == list(range(made.test.num_rows))
    schema, count = made.manifest.feed_schema, made.test.num_rows
    order = make_order(ShuffleSpec(mode="none"), count)
    feed = open_cached_feed([(made.source.storage, made.manifest)], "test", batch_rows=count, order=order, rank=0, world_size=1)
    (stored,) = feed.batches(0)
    prepared = _batches_of(ready.table, schema)(0, count)
    assert {info.name for info in schema.features} <= prepared.keys()
    for name, values in prepared.items():
        assert values.dtype == stored.columns[name].dtype and torch.equal(values, stored.columns[name]), name
    alone = [made.raw.prepare(table.slice(row, 1)).table for row in range(table.num_rows)]
    assert contents(pa.concat_tables(alone)) == contents(ready.table)


_REAL = st.none() | st.floats() | st.sampled_from([0.0, -0.0, 1e300])
_ROW = st.fixed_dictionaries(
    {
        "id": st.none() | st.text(max_size=3),
        "age": st.none() | st.integers(-(2**63), 2**63 - 1),
        "height": st.none() | st.floats(width=32),
        "town": st.sampled_from([None, "Ulm", "Bonn", "", "only 2", "elsewhere"]),
        "weight": _REAL,
        "kind": st.sampled_from(["no", "yes"]),
    }
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given_by(rows=st.lists(_ROW, min_size=1, max_size=5))
def test_raw_rows_are_prepared_as_in_training(people: Made, rows: list[dict[str, Any]]) -> None:
    source, table = people.source, pa.Table.from_pylist(rows, schema=people.raw.schema)
    chain, served = Chain(source.data, source.steps, people.fitted, source.code), people.raw.prepare(table)
    try:
        trained = chain.prepare(table, Origin.of_file("f", 0, len(rows)))
    except DataError:  # training refuses a table with an age that a double would round, and a model answers the other rows
        large = {row for row, given in enumerate(rows) if abs(given["age"] or 0) > 2**53}
        assert large and large <= {*served.problems}
        return
    assert served.rows.tolist() == trained.origin.rows.tolist()
    assert sorted([*served.problems, *served.rows.tolist()]) == list(range(len(rows)))
    if len(served.rows):
        assert contents(served.table) == contents(trained.table.select(served.table.column_names))


def test_rows_may_have_any_of_four_forms(made: Made) -> None:
    expected = contents(made.raw.prepare(made.table(made.test)[0]).table)
    listed = made.test.to_pylist()
    frame = made.test.to_pandas()
    for given in (frame, listed, {name: frame[name].tolist() for name in frame}, made.test.to_batches()[0]):
        table, problems = made.table(given)
        assert not problems
        assert contents(made.raw.prepare(table).table) == expected
    one, _ = made.table(listed[3:4])
    assert contents(made.raw.prepare(one).table) == {name: values[3:4] for name, values in expected.items()}


def test_rows_may_hold_bytes_in_base64(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = Made(images_source(tmp_path_factory.mktemp("json")))
    import base64

    row = {"image": base64.b64encode(made.test.column("image")[0].as_py()).decode()}
    expected = contents(made.raw.prepare(made.table(made.test.slice(0, 1))[0]).table)
    assert contents(made.raw.prepare(made.table([row])[0]).table) == expected
    assert made.raw.form.unneeded == ("label", "path")


def test_raw_rows_label_is_ignored(people: Made) -> None:
    table, _ = people.table(people.test.set_column(5, "kind", pa.array(["neither"] * people.test.num_rows)))
    assert contents(people.raw.prepare(table).table) == contents(people.raw.prepare(people.table(people.test)[0]).table)
    assert people.raw.form.unneeded == ("id", "kind")


def test_raw_rows_bad_row_names_column_value_rule(people: Made) -> None:
    rows = people.test.slice(0, 5).to_pylist()
    rows[1]["age"] = "old"
    rows[2]["weight"] = None
    rows[3]["weight"] = math.inf
    rows[4]["town"] = None
    table, problems = people.table(rows)
    ready = people.raw.prepare(table)
    said = {**ready.problems, **problems}
    assert said[1] == "row 1: column 'age' holds 'old', which does not read as int64"
    assert said[2] == "row 2: column 'weight' holds null; the model needs a value there"
    assert said[3] == "row 3: column 'weight' holds inf; the model needs a finite number there"
    assert said[4] == "row 4: column 'town' holds null; the model needs a value there"
    good = people.raw.prepare(people.table(rows[:1])[0])
    first = ready.table.slice(ready.rows.tolist().index(0), 1)
    assert contents(first) == contents(good.table)


def test_raw_rows_other_shape_is_reported(tmp_path: Path) -> None:
    made = Made(text_source(tmp_path))
    ready = made.raw.prepare(made.table({"text": ["abcdefgh", "short", "ijklmnop"]})[0])
    assert ready.rows.tolist() == [0, 2]
    assert "row 1" in ready.problems[1] and "the model takes tokens: int64[8]" in ready.problems[1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([{"age": 1, "heigth": 2.0, "town": "Ulm", "weight": 1}], "no column 'height'.*did you mean 'heigth'"),
        ({"age": [1, 2], "height": [1.0]}, "differ in their number of rows"),
        ({"age": 1, "height": 1.0}, "differ in their number of rows: .*one value"),
        ("{}", "cannot be given as str"),
        (7, "cannot be given as int"),
        (pd.DataFrame([[1, 2, "Ulm", 1, 3]], columns=["age", "height", "town", "weight", "age"]), "have two columns 'age'"),
        (pa.table([[1], [2]], names=["age", "age"]), "have two columns 'age'"),
    ],
)
def test_rows_of_other_forms_are_refused(people: Made, given: Any, words: str) -> None:
    with pytest.raises(DataError, match=words) as refused:
        people.table(given)
    assert refused.value.next_step


def test_numbers_may_have_any_lossless_form(people: Made) -> None:
    frame = pd.DataFrame({"age": [3.0, math.nan, 12.0], "height": ["1.5", None, "2"], "town": "Ulm", "weight": [1, 2, 3]})
    table, problems = people.table(frame)
    assert not problems
    assert table.column("age").to_pylist() == [3, None, 12]
    assert table.column("height").to_pylist() == [1.5, None, 2.0]
    _, problems = people.table({"age": [3.5], "height": [1.0], "town": ["Ulm"], "weight": [True]})
    assert problems == {0: "row 0: column 'age' holds 3.5, which does not read as int64"}


NOON = dt.datetime(2026, 1, 1, 12)


@pytest.mark.parametrize("as_arrow", [False, True])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int64(), NOON),
        (pa.int64(), NOON.time()),
        (pa.int64(), dt.timedelta(1)),
        (pa.int64(), True),
        (pa.float64(), True),
        (pa.string(), True),
        (pa.timestamp("us"), 1767225600000),
        (pa.bool_(), 2),
        (pa.bool_(), 0.5),
    ],
)
def test_time_number_and_bool_are_not_mixed(kind: pa.DataType, value: Any, as_arrow: bool) -> None:
    schema = pa.schema([("x", kind)])
    given = pa.table({"x": pa.array([value, None])}) if as_arrow else {"x": [value, None]}
    table, problems = raw_table(given_rows(given), schema, ())
    assert table["x"].to_pylist() == [None, None]
    assert problems[0].startswith("row 0: column 'x' holds ") and problems[0].endswith(f", which does not read as {kind}")


def test_uint64_beyond_int64_is_read_from_rows_of_python() -> None:
    large = 2**63 + 5
    schema = pa.schema([("x", pa.uint64())])
    for given in ([{"x": large}, {"x": 1}], {"x": [large, 1]}, pd.DataFrame({"x": [large, 1]}, dtype=object)):
        table, problems = raw_table(given_rows(given), schema, ())
        assert not problems and table["x"].to_pylist() == [large, 1]
    table, problems = raw_table(given_rows({"x": [large, True, -1, 2**64, 0.5]}), schema, ())
    assert table["x"].to_pylist() == [large, None, None, None, None] and list(problems) == [1, 2, 3, 4]


def test_bool_beside_float_is_not_a_number() -> None:
    for kind in (pa.string(), pa.float64(), pa.int64()):
        for given in ([5.0, True], [True, 5.0], [None, 5.0, True]):
            table, problems = raw_table(given_rows({"x": given}), pa.schema([("x", kind)]), ())
            row = given.index(True)
            assert table["x"][row].as_py() is None and list(problems) == [row]


def test_bool_may_be_number_or_word() -> None:
    schema = pa.schema([("x", pa.bool_())])
    for given in ([1, 0, None], [1.0, 0.0, None], ["true", "False", None], pa.array([1, 0, None])):
        table, problems = raw_table(given_rows({"x": given}), schema, ())
        assert not problems and table["x"].to_pylist() == [True, False, None]


def test_raw_form_keeps_image_label(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4)).save(stream, "PNG")
    picture = stream.getvalue()
    table = pa.table({"image": [{"bytes": picture, "path": None}] * 4, "mask": [{"bytes": picture, "path": None}] * 4})
    source = Source.of(tmp_path, {"train/a.parquet": table}, label="mask", images={"mode": "L"})
    fitted = source.fit()
    form = raw_form(source.data, fitted, {}, table)
    raw = RawRows(RawForm.model_validate_json(form.model_dump_json()), source.materialize(fitted=fitted).feed_schema)
    given = table.set_column(1, "mask", pa.nulls(4, table.schema.field("mask").type))
    assert raw.form.unneeded == ("mask",)
    assert raw.prepare(given).table["image"].combine_chunks().to_numpy_ndarray().shape == (4, 4, 4, 1)


def test_column_dropped_after_a_cast_is_not_needed(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2, 3, 4], "price": ["1.5", "2", "3", "4"], "kind": [0, 1, 0, 1]})
    source = Source.of(tmp_path, {"train/a.parquet": table}, [{"cast": {"price": "float64"}}, {"drop": ["id"]}], label="kind")
    assert raw_form(source.data, source.fit(), {}, table).unneeded == ("id", "kind")
