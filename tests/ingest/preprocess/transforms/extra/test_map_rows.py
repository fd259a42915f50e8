"""Code of the user that holds state, is written for one row, or gives another number of rows."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import DataError, SpecError
from penstock.flows.preflight.checks import check_recipe, check_resources
from penstock.flows.preflight.cpus import tasks_refused
from penstock.flows.spec_file import load_spec
from penstock.ingest.materialize.provenance import sources_of
from penstock.ingest.prepare import ClusterNode
from penstock.ingest.preprocess.problems import Origin
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transform_spec import FittedPreprocess
from penstock.ingest.preprocess.transforms.map_batches import forget_instances
from penstock.ingest.schema import ColumnInfo, FeedSchema
from penstock.tasks.records.keys import stage_keys
from penstock.training.registry.raw_rows import RawRows, raw_form
from tests.drills.project import make_project
from tests.ingest.preparing import Source

TABLE = pa.table(
    {
        "x": pa.array([1, 2, None, 4], pa.int32()),
        "text": ["a b", "c", None, "d e f"],
        "when": pa.array([0, 1, 2, 3], pa.timestamp("us")),
        "pixels": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8, dtype=np.uint8).reshape(4, 2)),
        "raw": pa.array([b"a\0", b"", None, b"b"]),
    }
)


def run(folder: Path, kind: str, body: str, table: pa.Table = TABLE, **options: Any) -> Rows:
    """One transform alone, of `f` in `body`."""
    (folder / "user.py").write_text(f"import numpy as np\n{body}\n")
    source = Source.of(folder, {}, [{kind: {"function": "user.py:f", **options}}])
    (step,) = source.steps
    rows = Rows(table, Origin.of_file("part-0.parquet", 100, table.num_rows))
    step.transform.apply(rows, (), source.data, {target: code.function() for target, code in source.code.items()})
    return rows


def test_map_large_integer_beside_null_is_exact_or_refused(tmp_path: Path) -> None:
    given = pa.table({"s": pa.array([2**60 + 1, None])})
    assert run(tmp_path, "map", "def f(row): return {'t': row['s']}", given).table["t"].to_pylist() == [2**60 + 1, None]
    for other in ("0.5", "2**63"):
        with pytest.raises(DataError, match="returned column 't' of dtype object, which cannot be kept"):
            run(tmp_path, "map", f"def f(row): return {{'t': row['s'] if row['s'] > 0 else {other}}}", given)


def test_map_keeps_what_it_returns_as_it_came(tmp_path: Path) -> None:
    rows = run(tmp_path, "map", "def f(row): return {**row, 'n': -1 if row['text'] is None else len(row['text'])}")
    assert rows.table.select(TABLE.column_names) == TABLE.combine_chunks()
    assert rows.table.column("n").to_pylist() == [3, 1, -1, 5] and rows.origin.rows.tolist() == [100, 101, 102, 103]
    changed = run(
        tmp_path, "map", "def f(row):\n    row['pixels'] *= 2\n    return {'pixels': row['pixels'], 'x': row['x'] + 1}"
    )
    assert changed.table.column("pixels").combine_chunks().to_numpy_ndarray().tolist() == [[0, 2], [4, 6], [8, 10], [12, 14]]
    assert changed.table.column("x").to_pylist()[:2] == [2.0, 3.0]
    lists = run(tmp_path, "map", "def f(row): return {'w': np.arange(len(row['text'] or ''))}").table.column("w")
    assert [len(each) for each in lists.to_pylist()] == [3, 1, 0, 5]
    text = run(tmp_path, "map", "def f(row): return {'b': row['raw'] and row['raw'] + b'\\0', 't': str(row['x'])}")
    assert text.table.column("b").to_pylist() == [b"a\0\0", b"", None, b"b\0"]


BESIDE = {
    "int": pa.array([5, 6, None], pa.uint8()),
    "truth": pa.array([True, False, None]),
    "time": pa.array([0, 1, None], pa.timestamp("us")),
    "list": pa.array([[250, 5], [1, None], None], pa.list_(pa.uint8())),
    "fixed": pa.array([[250, 5], [1, None], None], pa.list_(pa.uint8(), 2)),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), [2]), pa.array([[1, 2], [3, np.nan], None], pa.list_(pa.float32(), 2))
    ),
}


@pytest.mark.parametrize("kind", ["map", "flat_map", "filter"])
def test_row_functions_see_row_the_same_beside_nulls(tmp_path: Path, kind: str) -> None:
    said = tmp_path / "said"
    see = f"with open({str(said)!r}, 'a') as file: print({{name: repr(row[name]) for name in row}}, file=file)"
    body = f"def f(row):\n    {see}\n    return " + {"map": "row", "flat_map": "[row]", "filter": "True"}[kind]
    kept = run(tmp_path, kind, body, pa.table(BESIDE)).table
    assert kept.schema == pa.table(BESIDE).schema and str(kept.to_pylist()) == str(pa.table(BESIDE).to_pylist())
    for row in range(3):
        run(tmp_path, kind, body, pa.table(BESIDE).slice(row, 1))
    lines = said.read_text().splitlines()
    assert lines[:3] == lines[3:] and "'int': 'np.uint8(5)', 'truth': 'np.True_'" in lines[0] and "NaT" in lines[2]


WORDS = """
def f(row, upper=False):
    for number, word in enumerate((row['text'] or '').split()):
        row['word'] = word.upper() if upper else word
        row['number'] = number
        yield row
"""


def test_flat_map_rows_keep_place_and_types_of_their_row(tmp_path: Path) -> None:
    rows = run(tmp_path, "flat_map", WORDS, params={"upper": True})
    assert rows.table.column("word").to_pylist() == ["A", "B", "C", "D", "E", "F"]
    assert rows.table.column("x").to_pylist() == [1, 1, 2, 4, 4, 4] and rows.table.schema.field("x").type == pa.int32()
    assert rows.table.column("number").to_pylist() == [0, 1, 0, 0, 1, 2]
    assert rows.origin.rows.tolist() == [100, 100, 101, 103, 103, 103] and rows.filtered == {"flat_map": 1}
    none = run(tmp_path, "flat_map", "def f(row): return []")
    assert none.num_rows == 0 and none.filtered == {"flat_map": 4}


def test_filter_leaves_rows_out_and_counts_them(tmp_path: Path) -> None:
    rows = run(tmp_path, "filter", "def f(row): return not np.isnan(row['x']) and row['x'] > 1")
    assert rows.table == TABLE.take([1, 3]).combine_chunks() and rows.filtered == {"filter": 2}
    with pytest.raises(DataError, match=r"filter user\.py:f returned 1 for part-0\.parquet, row 100 \(from 0\)") as refused:
        run(tmp_path, "filter", "def f(row): return 1")
    assert refused.value.next_step == "correct user.py:f"


def test_map_batches_names_given_row_of_each_result(tmp_path: Path) -> None:
    body = "def f(b): return {'x': np.array([10, 20, 30]), '_from': np.array([1, 1, 3]), '_keep': [True, False, True]}"
    rows = run(tmp_path, "map_batches", body)
    assert rows.table.column("x").to_pylist() == [10, 30] and rows.origin.rows.tolist() == [101, 103]
    assert rows.filtered == {"map_batches": 3}
    for wrong in ("[1, 0, 3]", "[0, 1, 4]", "[-1, 0, 1]", "[0.0, 1.0, 2.0]"):
        with pytest.raises(
            DataError, match="'_from', which must hold an integer from 0 to 3 for each row it returns, ascending"
        ):
            run(tmp_path, "map_batches", body.replace("[1, 1, 3]", wrong))
    with pytest.raises(DataError, match="came back with 3 rows for 4 rows") as refused:
        run(tmp_path, "map_batches", "def f(b): return {'x': np.array([10, 20, 30])}")
    assert "return a column '_from'" in refused.value.next_step


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("map", "def f(row): return 3", r"returned int for part-0\.parquet, row 100"),
        (
            "map",
            "def f(row): return {'a': 1} if row['x'] == 1 else {'b': 1}",
            r"returned \['b'\] for .*row 101.*\['a'\] before",
        ),
        ("map", "def f(row): return {'x': 1, '_keep': True}", "to leave rows out, use filter"),
        ("flat_map", "def f(row): return {'x': 1}", "returned dict for .* must return a list of dicts"),
        ("flat_map", "def f(row): pass", "returned NoneType for .*row 100"),
        ("map", "def f(row): return {1: 2}", "returned a column called 1; a name must be text"),
        ("flat_map", "def f(row): yield 1 / 0", r"raised ZeroDivisionError.*row 100"),
        ("map", "class f:\n    def __init__(self): 1 / 0\n    def __call__(self, row): return row", "raised ZeroDivisionError"),
    ],
)
def test_wrong_results_of_rows_name_row_and_rule(tmp_path: Path, kind: str, body: str, message: str) -> None:
    with pytest.raises(DataError) as refused:
        run(tmp_path, kind, body)
    assert re.search(message, str(refused.value).replace("\n", " ")), str(refused.value)


FILLS = """
class f:
    def __init__(self): self.row, self.list, self.array = {}, [0], np.zeros(2, np.uint8)
    def __call__(self, row):
        self.array[:], self.list[0] = row['pixels'] + 1, row['pixels'][0]
        self.row |= {'number': row['pixels'][1], 'list': self.list, 'array': self.array}
        return self.row
"""

CHANGES = """
def f(row):
    for _ in range(2):
        row['pixels'] += 1
        yield row
"""


def test_row_that_code_changes_later_is_kept_as_it_was(tmp_path: Path) -> None:
    filled = run(tmp_path, "map", FILLS).table
    assert filled.column("number").to_pylist() == [1, 3, 5, 7] and filled.column("list").to_pylist() == [[0], [2], [4], [6]]
    assert filled.column("array").combine_chunks().to_numpy_ndarray().tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    changed = run(tmp_path, "flat_map", CHANGES).table
    assert changed.column("pixels").combine_chunks().to_numpy_ndarray()[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert changed.schema.field("x").type == pa.int32() and changed.column("x").null_count == 2


def test_array_that_class_fills_again_is_copied(tmp_path: Path) -> None:
    body = (
        "def __init__(self): self.held = np.zeros(4)\n    def __call__(self, b): self.held[:] = b['n']; return {'n': self.held}"
    )
    tables = [run(tmp_path, "map_batches", f"class f:\n    {body}", pa.table({"n": [n] * 4})).table for n in (1, 2)]
    assert [table.column("n").to_pylist() for table in tables] == [[1.0] * 4, [2.0] * 4]


def test_class_may_make_another_class(tmp_path: Path) -> None:
    body = """
from penstock.ingest.preprocess.transforms.map_batches import ready
class Inner:
    def __call__(self, batch): return batch
class Names:
    function, name = "inner", "map_batches"
    class options: params = {}
class f:
    def __init__(self): self.inner = ready(Names, {"inner": Inner})
    def __call__(self, batch): return self.inner(batch)
"""
    assert run(tmp_path, "map_batches", body, pa.table({"x": [1]})).num_rows == 1


HOLDS = """
class Adds:
    made = 0
    def __init__(self, by, file):
        Adds.made += 1
        self.by = by + len(open(file).read())
    def __call__(self, batch):
        return {**batch, 'made': np.full(len(batch['x']), Adds.made), 'x': batch['x'] + self.by}
f = Adds
"""


def test_class_is_made_once_for_equal_params(tmp_path: Path) -> None:
    forget_instances()
    (tmp_path / "three.txt").write_text("abc")
    params = {"by": 1, "file": str(tmp_path / "three.txt")}
    table = pa.table({"x": [1, 2]})
    for _ in range(2):
        rows = run(tmp_path, "map_batches", HOLDS, table, params=params)
        assert rows.table.column("x").to_pylist() == [5, 6] and rows.table.column("made").to_pylist() == [1, 1]
    assert run(tmp_path, "map_batches", HOLDS, table, params={**params, "by": 2}).table.column("made").to_pylist() == [2, 2]
    forget_instances()
    assert run(tmp_path, "map_batches", HOLDS, table, params=params).table.column("made").to_pylist() == [3, 3]


def test_two_wrappers_of_one_class_have_instances_of_their_own(tmp_path: Path) -> None:
    body = "from functools import wraps\nclass C:\n    def __init__(self, by): self.by = by\n"
    body += "    def __call__(self, b): return {**b, 'x': b['x'] * self.by}\n"
    body += "def times(by):\n    @wraps(C, updated=())\n    def made(): return C(by)\n    return made\n"
    body += "ten, hundred = times(10), times(100)\n"
    (tmp_path / "user.py").write_text(body)
    for name, made in (("ten", [10, 20]), ("hundred", [100, 200])):
        source = Source.of(tmp_path, {}, [{"map_batches": f"user.py:{name}"}])
        functions = {target: code.function() for target, code in source.code.items()}
        rows = Rows(pa.table({"x": [1, 2]}), Origin.of_file("part-0.parquet", 0, 2))
        source.steps[0].transform.apply(rows, (), source.data, functions)
        assert rows.table.column("x").to_pylist() == made


def test_installed_class_is_made_again_for_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    text = "class Counts:\n    def __init__(self, file): self.n = len(open(file).read())\n"
    text += "    def __call__(self, b): return {**b, 'n': [self.n] * len(b['x'])}\n"
    (tmp_path / "site" / "counts_of_files.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    entry = {"map_batches": {"function": "counts_of_files:Counts", "params": {"file": "words.txt"}}}
    source = Source.of(tmp_path, {"train/a.parquet": pa.table({"x": [0, 1], "y": [0, 1]})}, [entry], label="y")
    source.ships_params = True
    for words in ("abc", "abcdef"):
        (tmp_path / "words.txt").write_text(words)
        assert source.column(source.materialize(), "n", "train").tolist() == [len(words)] * 2


def test_params_are_the_same_before_and_after_the_record(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text("def f(b, since): return {**b, 'z': [len(since)] * len(b['x'])}")
    table = pa.table({"x": [0, 1], "y": [0, 1]})
    steps = [{"map_batches": {"function": "user.py:f", "params": {"since": date(2020, 1, 1)}}}]
    source = Source.of(tmp_path, {"train/a.parquet": table}, steps, label="y")
    fitted = source.fit()
    assert fitted == FittedPreprocess.model_validate(fitted.model_dump(mode="json"))
    assert source.column(source.materialize(), "z", "train").tolist() == [10, 10]
    steps[0]["map_batches"]["params"] = {"names": [{0: "cat"}]}
    with pytest.raises(ValueError, match="the key 0 is not text, which it becomes on record; write it as '0'"):
        Source.of(tmp_path, {}, steps)


def test_key_knows_source_of_class_and_check_refuses_others(tmp_path: Path) -> None:
    file = make_project(tmp_path / "p", files=1)
    override = "preprocess=[{map_batches: held.py:Model}]"
    held, keys = file.parent / "held.py", list[str]()
    for body in ("return {**b, 'f': b['f']}", "return {**b}"):
        held.write_text(f"class Model:\n    def __call__(self, b):\n        {body}\n")
        keys.append(stage_keys(load_spec(file, [override]).project, lambda *_: None)["preprocess"].key)
    assert keys[0] != keys[1]
    held.write_text("class Model:\n    pass\n")
    with pytest.raises(SpecError, match=r"held\.py:Model is not a function, nor a class with `__call__`"):
        check_recipe(load_spec(file, [override]).project)
    flat = load_spec(file, ["preprocess=[{flat_map: held.py:Model}]"]).project
    assert "the registered model refuses a row of which flat_map makes several" in check_resources(flat)


def documents(folder: Path, rows: int = 60) -> Source:
    """Two files of documents of 0 to 3 words."""
    folder.mkdir(exist_ok=True)
    (folder / "user.py").write_text(
        "def f(row):\n    for n in range(int(row['words'])):\n        yield {'doc': row['doc'], 'n': n, 'y': n % 2}\n"
        "def g(row): return row['n'] < 2\n"
    )
    table = pa.table({"doc": range(rows), "words": [n % 4 for n in range(rows)], "y": [0] * rows})
    files = {"train/a.parquet": table.slice(0, rows // 2), "train/b.parquet": table.slice(rows // 2)}
    steps = [{"flat_map": "user.py:f"}, {"filter": "user.py:g"}, {"standard_scaler": {"columns": ["n"]}}]
    return Source.of(folder, files, steps, label="y", validation={"fraction": 0.3}, test={"fraction": 0.2})


def test_rows_of_one_source_row_stay_in_one_split(tmp_path: Path) -> None:
    source = documents(tmp_path)
    manifest = source.materialize()
    docs = {split: source.column(manifest, "doc", split).tolist() for split in ("train", "validation", "test")}
    assert all(docs.values()) and not set(docs["train"]) & {*docs["validation"], *docs["test"]}
    assert sorted(doc for of in docs.values() for doc in of) == sorted(doc for doc in range(60) for _ in range(min(2, doc % 4)))
    dropped = manifest.extra["dropped"]
    assert dropped == {"left out by flat_map": 15, "left out by filter": 15}
    found = sources_of(source.storage, manifest, "train", np.arange(manifest.rows["train"]))
    names = {"a.parquet": 0, "b.parquet": 30}
    assert [names[found.names[file]] + row for file, row in zip(found.files, found.rows, strict=True)] == docs["train"]
    again = documents(tmp_path / "second").materialize(piece_bytes=1)  # cut elsewhere: the same rows in the same order
    assert again.split_digests == manifest.split_digests


def test_registered_model_refuses_row_of_several_by_name(tmp_path: Path) -> None:
    source = documents(tmp_path)
    fitted = source.fit()
    example = pa.table({"doc": [1], "words": [1], "y": [0]})
    form = raw_form(source.data, fitted, source.code, example)
    features = tuple(ColumnInfo(name=name, dtype=kind, shape=()) for name, kind in (("doc", "int64"), ("n", "float32")))
    raw = RawRows(form, FeedSchema(columns=features, label="y"))
    given = pa.table({"doc": range(4), "words": range(4), "y": pa.nulls(4, pa.int64())})
    ready = raw.prepare(given)
    assert ready.rows.tolist() == [1] and ready.table.column("doc").to_pylist() == [1]
    assert "the preprocessing leaves it out (filter, flat_map" in ready.problems[0]
    assert ready.problems[2] == "row 2: the preprocessing makes 2 rows of it, and the model answers one"
    assert set(ready.problems) == {0, 2, 3}


def test_gpu_of_transform_is_asked_of_cluster_and_of_disk(tmp_path: Path) -> None:
    file = make_project(tmp_path / "p", files=1)
    (file.parent / "held.py").write_text("class Model:\n    def __call__(self, b): return b\n")
    override = "preprocess=[{map_batches: {function: held.py:Model, num_gpus: 0.5}}]"
    spec = load_spec(file, [override]).spec
    assert spec.preparing.options()["num_gpus"] == 0.5 and spec.prepare.options()["num_gpus"] is None
    assert tasks_refused(spec, [ClusterNode({"CPU": 4.0, "GPU": 1.0}, {})]) is None
    refusal = tasks_refused(spec, [ClusterNode({"CPU": 4.0}, {})])
    assert refusal is not None and "prepare.map_batches.num_gpus: a task takes 0.5 GPU, and no node has any" in str(refusal)
    with pytest.raises(SpecError, match="rows that a GPU prepares"):
        load_spec(file, [override, "materialize.cache=memory"])
