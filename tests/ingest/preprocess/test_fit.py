"""Fitting: what is learnt, from which rows, and that it comes back from JSON to the bit; on Ray and in this process."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

from penstock.errors import DataError
from penstock.ingest.preprocess.chain import BATCH_ROWS, NUMBERS_BATCH_ROWS, split_rows
from penstock.ingest.preprocess.fit import needs_fit
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.problems import RowProblem, raise_for
from penstock.ingest.preprocess.tallies import ask
from penstock.ingest.preprocess.transform_spec import FittedPreprocess, TransformSpec
from penstock.ingest.ray_tasks import ParallelMap, local_map, ray_map
from tests import ROOT
from tests.ingest.preparing import Source

RNG = np.random.default_rng(3)
X = (RNG.normal(size=300) * 37 + 1e6).astype(np.float64)
FILES = {
    f"train/part-{i}.parquet": pa.table(
        {
            "x": pa.array([None if row % 50 == 7 else float(X[row]) for row in range(i * 100, i * 100 + 100)]),
            "n": pa.array([None if row % 9 == 0 else row % 4 for row in range(100)], pa.int64()),
            "c": pa.array([None if row % 11 == 0 else "cab"[(row * row + i) % 3] for row in range(100)]),
            "label": pa.array(["dog" if row % 3 else "cat" for row in range(100)]),
        }
    )
    for i in range(3)
}
# What a leak from the test split would change: every statistic.
FILES["test/part-0.parquet"] = pa.table({"x": [1e12, -1e12], "n": [77, -77], "c": ["zebra", "zebu"], "label": ["emu", "ant"]})
SEEN = X[[row for row in range(300) if row % 50 != 7]]


@pytest.fixture(params=["here", pytest.param("ray", marks=pytest.mark.slow)])
def parallel(request: pytest.FixtureRequest) -> ParallelMap:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        return ray_map
    return local_map


def fit(folder: Path, *steps: Any, parallel: ParallelMap, **data: Any) -> FittedPreprocess:
    return Source.of(folder, FILES, steps, test="test", label="label", **data).fit(parallel)


def test_fit_every_kind_learns_from_train_only(tmp_path: Path, parallel: ParallelMap) -> None:
    fitted = fit(
        tmp_path,
        {"imputer": {"columns": ["n"], "strategy": "most_frequent"}},
        {"one_hot": {"columns": ["c"]}},
        {"standard_scaler": {"columns": ["x"]}},
        "label_encoder",
        parallel=parallel,
    )
    imputer, one_hot, scaler, encoder = (step.columns[0] for step in fitted.steps)
    values = [row % 4 for _ in range(3) for row in range(100) if row % 9]
    counts = {value: values.count(value) for value in range(4)}
    assert counts[imputer.fill] == max(counts.values())  # type: ignore[index]
    assert type(imputer.fill) is int
    assert one_hot.categories == ("a", "b", "c")
    assert scaler.center == pytest.approx(SEEN.mean(), rel=1e-12)
    assert scaler.scale == pytest.approx(SEEN.std(), rel=1e-9)
    assert encoder.categories == ("cat", "dog")
    assert (fitted.classes, fitted.num_classes) == (("cat", "dog"), 2)


@pytest.mark.parametrize(
    ("step", "center", "scale"),
    [
        ({"min_max_scaler": {"columns": ["x"]}}, SEEN.min(), SEEN.max() - SEEN.min()),
        ({"max_abs_scaler": {"columns": ["x"]}}, 0.0, np.abs(SEEN).max()),
        ({"robust_scaler": {"columns": ["x"]}}, np.median(SEEN), np.subtract(*np.quantile(SEEN, [0.75, 0.25]))),
    ],
)
def test_fit_scalers_learn_center_and_scale(
    tmp_path: Path, parallel: ParallelMap, step: Any, center: float, scale: float
) -> None:
    state = fit(tmp_path, step, parallel=parallel).steps[0].columns[0]
    assert state == ColumnState(column="x", center=center, scale=scale)


@pytest.mark.parametrize(
    "kind", [pa.float16(), pa.float32(), pa.float64(), pa.int8(), pa.int64(), pa.uint64(), pa.bool_()], ids=str
)
@pytest.mark.parametrize("gaps", [[], [None], [float("nan")], [float("inf")], [-float("inf")], [None, float("nan")]], ids=str)
def test_fit_every_number_type_ignores_gaps(tmp_path: Path, kind: pa.DataType, gaps: list[Any]) -> None:
    holds = [gap for gap in gaps if gap is None or pa.types.is_floating(kind)]
    numbers = np.array([0, 1, 1, 0, 1] if pa.types.is_boolean(kind) else [3, 1, 100, 7, 19], np.float64)
    if pa.types.is_floating(kind):
        numbers = np.array([300, -0.0, 2000.0, 0.0, 7])  # a half float holds no square of 300
    floats = pa.array([*numbers[:2].tolist(), *holds, *numbers[2:].tolist()])
    steps = [{name: {"columns": [name]}} for name in ("standard_scaler", "min_max_scaler", "max_abs_scaler", "robust_scaler")]
    table = pa.table({name: floats.cast(kind) for step in steps for name in step})
    standard, min_max, max_abs, robust = (
        (step.columns[0].center, step.columns[0].scale)
        for step in Source.of(tmp_path, {"train/a.parquet": table}, steps).fit().steps
    )
    assert standard == pytest.approx((numbers.mean(), numbers.std()), rel=1e-12)
    assert min_max == (numbers.min(), np.ptp(numbers))
    assert max_abs == (0.0, numbers.max())
    assert np.copysign(1.0, min_max[0]) == 1.0  # which of the two zeros it is must not depend on the processor
    assert robust == (np.median(numbers), np.subtract(*np.quantile(numbers, [0.75, 0.25])))


def test_fit_finds_types_from_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def spy(data: Any, snapshot: Any, files: Any, batch_rows: int, piece: Any) -> Any:
        asked.append(batch_rows)
        return split_rows(data, snapshot, files, batch_rows, piece)

    monkeypatch.setattr("penstock.ingest.preprocess.fit.split_rows", spy)
    files = {"train/a.parquet": pa.table({"x": np.arange(10_000.0)})}
    Source.of(tmp_path, files, [{"standard_scaler": {"columns": ["x"]}}]).fit()
    assert asked == [BATCH_ROWS, NUMBERS_BATCH_ROWS]


@pytest.mark.parametrize("step", ["standard_scaler", "ordinal"])
def test_fit_names_column_missing_in_later_rows(tmp_path: Path, step: str) -> None:
    (tmp_path / "code.py").write_text(
        "def f(batch):\n    return {n: batch[n] for n in batch if n == 'y' or batch['y'][0] == 0}\n"
    )
    files = {"train/a.parquet": pa.table({"x": [1, 2], "y": [0, 0]}), "test/a.parquet": pa.table({"x": [1], "y": [1]})}
    source = Source.of(tmp_path, files, [{"map_batches": "code.py:f"}, {step: {"columns": ["x"]}}], test="test")
    with pytest.raises(DataError, match=rf"preprocess\[1\]\.{step}: there is no column 'x' at this point; the rows have y"):
        source.materialize()


def test_fit_later_transform_learns_from_earlier_result(tmp_path: Path, parallel: ParallelMap) -> None:
    steps = [
        {"rename": {"x": "amount"}},
        {"imputer": {"columns": ["amount"], "strategy": "constant", "fill_value": 0.0}},
        {"min_max_scaler": {"columns": ["amount"]}},
        {"standard_scaler": {"columns": ["amount"]}},
    ]
    second = fit(tmp_path, *steps, parallel=parallel).steps[3].columns[0]
    filled = np.array([0.0 if row % 50 == 7 else X[row] for row in range(300)])
    scaled = (filled / filled.max()).astype(np.float32).astype(np.float64)
    assert second.center == pytest.approx(scaled.mean(), rel=1e-6)
    assert second.scale == pytest.approx(scaled.std(), rel=1e-6)


@pytest.mark.parametrize("kind", ["standard_scaler", "min_max_scaler", "robust_scaler"])
def test_scalers_scale_small_numbers_and_zero_constants(tmp_path: Path, kind: str) -> None:
    farads = np.random.default_rng(0).normal(5e-9, 2e-9, 1000)
    table = pa.table({"farads": farads, "third": np.full(1000, 1e13 / 3), "noise": [0.1 + 0.2, 0.3] * 500})
    source = Source.of(tmp_path, {"train/a.parquet": table}, [{kind: {"columns": "*"}}])
    source.materialize()
    column = {name: source.column(source.materialize(), name) for name in table.column_names}
    assert 0.1 < column["farads"].std() < 2
    assert not column["third"].any() and np.abs(column["noise"]).max() < 1e-15


def test_fit_ignores_held_out_rows_of_same_files(tmp_path: Path, parallel: ParallelMap) -> None:
    source = Source.of(
        tmp_path,
        {"train/a.parquet": pa.table({"x": np.arange(500.0), "g": np.arange(500)})},
        [{"standard_scaler": {"columns": ["x"]}}],
        validation={"fraction": 0.5, "by": "g"},
    )
    manifest = source.materialize()
    rows = source.column(manifest, "_row")
    assert 150 < len(rows) < 350
    assert source.fit(parallel).steps[0].columns[0].center == pytest.approx(rows.mean(), rel=1e-12)


def test_one_hot_max_categories_keeps_most_frequent(tmp_path: Path, parallel: ParallelMap) -> None:
    files = {"train/a.parquet": pa.table({"c": ["z"] * 5 + ["m"] * 3 + ["a"]})}
    source = Source.of(tmp_path, files, [{"one_hot": {"columns": ["c"], "max_categories": 2}}])
    assert source.fit(parallel).steps[0].columns[0].categories == ("m", "z")


@pytest.mark.parametrize(
    "step", [{"standard_scaler": {"columns": ["x"]}}, {"imputer": {"columns": ["x"]}}, {"robust_scaler": {"columns": ["x"]}}]
)
def test_fit_without_values_is_refused(tmp_path: Path, parallel: ParallelMap, step: Any) -> None:
    table = pa.table({"x": pa.array([None, float("nan")], pa.float64()), "y": [1, 2]})
    with pytest.raises(DataError, match="column 'x' has no values in the train split"):
        Source.of(tmp_path, {"train/a.parquet": table}, [step]).fit(parallel)


def test_one_hot_refuses_absurd_length(tmp_path: Path) -> None:
    files = {"train/a.parquet": pa.table({"c": [f"id-{i}" for i in range(10_001)]})}
    with pytest.raises(DataError, match="'c' has 10,001 categories") as caught:
        Source.of(tmp_path, files, [{"one_hot": {"columns": ["c"]}}]).fit()
    assert "ordinal" in str(caught.value)


def test_fit_missing_column_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"standard_scaler: there is no column 'fare'.*x \(double\)"):
        fit(tmp_path, {"standard_scaler": {"columns": ["fare"]}}, parallel=local_map)
    source = Source.of(
        tmp_path / "towns",
        {"train/a.parquet": pa.table({"fare": [1.0], "town": ["Ulm"]})},
        [{"one_hot": {"columns": ["towm"]}}],
    )
    with pytest.raises(DataError, match=r"no column 'towm' at this point; .*; did you mean 'town'\?"):
        source.fit()


def test_fit_names_failing_user_code(tmp_path: Path, parallel: ParallelMap) -> None:
    (tmp_path / "user.py").write_text(
        "def f(batch):\n    if batch['x'].max() > 2:\n        raise ValueError('too large')\n    return batch\n"
    )
    files = {f"train/{i}.parquet": pa.table({"x": [i, i]}) for i in range(5)}
    source = Source.of(tmp_path, files, [{"map_batches": "user.py:f"}, {"standard_scaler": {"columns": ["x"]}}])
    with pytest.raises(DataError, match=r"user\.py:f raised ValueError: too large"):
        source.fit(parallel)


def test_fitted_state_survives_json_exactly(tmp_path: Path) -> None:
    fitted = fit(
        tmp_path, {"standard_scaler": {"columns": ["x"]}}, {"ordinal": {"columns": ["c"]}}, "label_encoder", parallel=local_map
    )
    text = json.dumps(fitted.model_dump(mode="json"))
    again = FittedPreprocess.model_validate(json.loads(text))
    assert again == fitted
    assert again.digest == fitted.digest
    assert (again.steps[0].columns[0].center or 0).hex() == (fitted.steps[0].columns[0].center or 0).hex()


@pytest.mark.parametrize("damage", [{"version": 2}, {"stepz": []}, {"steps": [{"step": {"standard_scaler": {}}}]}])
def test_fitted_state_damaged_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        FittedPreprocess.model_validate({"steps": [], **damage})


def test_needs_fit_is_true_for_learning_transforms() -> None:
    def parse(*steps: Any) -> list[TransformSpec]:
        return [TransformSpec.model_validate(step) for step in steps]

    assert needs_fit(parse({"drop": ["a"]}, "label_encoder"))
    assert not needs_fit(parse({"drop": ["a"]}, {"map_batches": "a.py:f"}))


def test_fit_without_learning_reads_no_row(tmp_path: Path) -> None:
    source = Source.of(tmp_path, FILES, [{"drop": ["c"]}])
    for path in (tmp_path / "train").iterdir():
        assert path.stat().st_size
    snapshot = source.snapshot()
    (tmp_path / "train/part-0.parquet").unlink()
    from penstock.ingest.preprocess.fit import fit_preprocess
    from penstock.progress import silent

    assert len(fit_preprocess(source.data, source.steps, snapshot, {}, silent).steps) == 1


@pytest.mark.slow
def test_fit_on_ray_gives_equal_floats(tmp_path: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import penstock.ingest.preprocess.fit

    monkeypatch.setattr(
        penstock.ingest.preprocess.fit, "FIT_UNIT_BYTES", 1
    )  # a task per file, so that partial sums meet in some order
    files = {f"train/{i:02d}.parquet": pa.table({"x": RNG.normal(size=97) * 10.0 ** (i % 7)}) for i in range(24)}
    source = Source.of(tmp_path, files, [{"standard_scaler": {"columns": ["x"]}}])
    states = {source.fit(ray_map).model_dump_json() for _ in range(4)}
    assert len(states) == 1


class Numbers:
    """200,000 of them, in 20 tables."""

    def tables(self) -> Iterator[pa.Table]:
        return (pa.table({"x": np.random.default_rng(seed).random(10_000)}) for seed in range(20))


def test_fit_quantiles_memory_matches_docs() -> None:
    question = TransformSpec.model_validate({"robust_scaler": {"columns": ["x"]}}).transform.question("x")
    tracemalloc.start()
    (facts,) = ask([question], [[Numbers()]], local_map)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert facts is not None and len(facts.quantiles) >= 3
    assert peak / 200_000 == pytest.approx(8 + 16, abs=1)


def test_fit_does_not_depend_on_blas_threads(tmp_path: Path) -> None:
    Source.of(tmp_path, {"train/a.parquet": pa.table({"x": RNG.normal(size=60_000)})})
    script = (
        "import sys; from pathlib import Path; from tests.ingest.preparing import Source\n"
        "source = Source.of(Path(sys.argv[1]), {}, [{'standard_scaler': {'columns': ['x']}}])\n"
        "print(source.fit().steps[0].columns[0].scale.hex())"
    )
    found = set()
    for threads in "1", "2":
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": threads}
        command = [sys.executable, "-c", script, str(tmp_path)]
        found.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    assert len(found) == 1


@pytest.mark.slow
def test_fit_skips_file_without_train_rows(tmp_path: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import penstock.ingest.preprocess.fit

    monkeypatch.setattr(penstock.ingest.preprocess.fit, "FIT_UNIT_BYTES", 1)
    groups = {f"train/{i}.parquet": pa.table({"x": [float(i)] * 10, "g": [i] * 10, "c": [str(i)] * 10}) for i in range(8)}
    steps = [{"standard_scaler": {"columns": ["x"]}}, {"one_hot": {"columns": ["c"]}}]
    source = Source.of(tmp_path, groups, steps, validation={"fraction": 0.5, "by": "g"})
    kept = sorted(set(source.column(source.materialize(), "g").tolist()))
    assert 0 < len(kept) < 8
    scaler, one_hot = (step.columns[0] for step in source.fit(ray_map).steps)
    assert scaler.center == pytest.approx(np.mean(kept))
    assert one_hot.categories == tuple(str(group) for group in kept)


@pytest.mark.slow
def test_fit_equals_ray_preprocessors(tmp_path: Path, ray_cluster: None) -> None:
    import ray.data
    from ray.data import preprocessors

    steps = [{"standard_scaler": {"columns": ["x"]}}, {"ordinal": {"columns": ["c"]}}, "label_encoder"]
    scaler, ordinal, encoder = (step.columns[0] for step in fit(tmp_path, *steps, parallel=local_map).steps)
    train = ray.data.from_arrow(list(FILES.values())[:3])
    theirs = preprocessors.StandardScaler(["x"]).fit(train).stats_
    assert (scaler.center, scaler.scale) == pytest.approx((theirs["mean(x)"], theirs["std(x)"]), rel=1e-12)
    present = train.map_batches(lambda table: table.select(["c"]).drop_null(), batch_format="pyarrow")
    codes = preprocessors.OrdinalEncoder(["c"]).fit(present).stats_["unique_values(c)"]
    assert {category: index for index, category in enumerate(ordinal.categories or ())} == codes
    classes = preprocessors.LabelEncoder("label").fit(train).stats_["unique_values(label)"]
    assert {category: index for index, category in enumerate(encoder.categories or ())} == classes


@pytest.mark.parametrize("kind", ["standard_scaler", "min_max_scaler", "max_abs_scaler"])
def test_apply_equals_ray_preprocessors(tmp_path: Path, kind: str) -> None:
    from ray.data import preprocessors

    state = fit(tmp_path, {kind: {"columns": ["x"]}}, parallel=local_map).steps[0].columns[0]
    assert state.center is not None and state.scale is not None
    make: dict[str, Callable[[], Any]] = {
        "standard_scaler": lambda: preprocessors.StandardScaler(["x"]),
        "min_max_scaler": lambda: preprocessors.MinMaxScaler(["x"]),
        "max_abs_scaler": lambda: preprocessors.MaxAbsScaler(["x"]),
    }
    stats = {"mean(x)": state.center, "std(x)": state.scale, "min(x)": state.center, "max(x)": state.center + state.scale}
    theirs = make[kind]()
    theirs.stats_, theirs._fitted = {**stats, "abs_max(x)": state.scale}, True
    expected = theirs.transform_batch(pd.DataFrame({"x": SEEN}))["x"].to_numpy()
    ours = ((SEEN - state.center) / state.scale).astype(np.float32)
    assert np.array_equal(ours, np.asarray(expected, np.float32))


def test_imputer_most_frequent_takes_numbers_and_refuses_dates(tmp_path: Path) -> None:
    def source(folder: str, column: pa.Array) -> Source:
        step = {"imputer": {"columns": ["c"], "strategy": "most_frequent"}}
        return Source.of(tmp_path / folder, {"train/a.parquet": pa.table({"c": column, "x": [1.0, 2.0, 3.0]})}, [step])

    for name, kind in (("half", pa.float16()), ("float", pa.float32()), ("int", pa.int16()), ("bool", pa.bool_())):
        (column,) = source(name, pa.array([1, 1, None]).cast(kind)).fit().steps[0].columns
        assert column.fill == 1
    with pytest.raises(DataError, match=r"imputer cannot take column 'c' of type date32") as refused:
        source("date", pa.array([1, 1, None], pa.int32()).cast(pa.date32())).fit()
    assert "cast it to string" in refused.value.next_step


def test_advice_for_missing_text_fills_it(tmp_path: Path) -> None:
    rows = pa.table({"city": ["a", None, "a"], "x": [1.0, 2.0, 3.0]})

    def source(folder: str, step: dict[str, Any]) -> Source:
        return Source.of(tmp_path / folder, {"train/a.parquet": rows}, [step])

    with pytest.raises(DataError, match="a null in city") as missing:
        raise_for([RowProblem(reason="null", column="city", rows=1, place="a.parquet, row 1")])
    assert "imputer: {columns: [city], strategy: most_frequent}" in missing.value.next_step
    with pytest.raises(DataError, match="2 reasons") as both:
        raise_for([RowProblem(reason="null", column=name, rows=1, place="a.parquet, row 1") for name in ("city", "x")])
    assert both.value.next_step.count("most_frequent") == 1 and "drop: [city, x]" in both.value.next_step
    with pytest.raises(DataError, match="imputer cannot take column 'city'") as refused:
        source("mean", {"imputer": {"columns": ["city"]}}).fit()
    assert "strategy: most_frequent" in refused.value.next_step
    advised: dict[str, Any] = {"imputer": {"columns": ["city"], "strategy": "most_frequent"}}
    assert source("advised", advised).fit().steps[0].columns[0].fill == "a"


@pytest.mark.parametrize(
    ("between", "passes"),
    [
        ({"cast": {"z": "float32"}}, 1),
        ({"drop": ["z"]}, 1),
        ({"rename": {"z": "w"}}, 1),
        ({"rename": {"kind": "sort"}}, 2),
        ({"cast": {"kind": "string"}}, 2),
        ({"map_batches": "code.py:same"}, 2),
        ({"concatenator": {"columns": "*", "output": "features"}}, 1),
        ({"concatenator": {"columns": "*", "output": "kind"}}, 1),
    ],
)
def test_fit_independent_transforms_share_a_pass(tmp_path: Path, between: dict[str, Any], passes: int) -> None:
    (tmp_path / "code.py").write_text(CODE)
    column = "sort" if "sort" in str(between) else "kind"
    later = [LEARN] if "concatenator" in between else [{"one_hot": {"columns": [column]}}, LEARN]
    steps = [{"standard_scaler": {"columns": ["x"]}}, between, *later]
    rows = {"x": [1.0, 2.0, 3.0], "z": [1, 2, 3], "kind": ["a", "b", "a"], "label": ["p", "q", "p"]}
    source, asked = Source.of(tmp_path, {"train/a.parquet": pa.table(rows)}, steps, label="label"), []

    def counted(fn: Any, items: Any) -> Any:
        asked.append(1)
        return local_map(fn, items)

    fitted = source.fit(counted)
    assert len(asked) == passes and fitted.classes == ("p", "q")
    assert [len(entry.columns) for entry in fitted.steps] == [1, 0, *(1 for _ in later)]
    assert fitted.steps[0].columns[0].center == 2.0


def test_fit_second_pass_reads_few_of_the_chosen_columns(tmp_path: Path) -> None:
    rows = {"x": [1.0, None, 3.0], "z": [1, 2, 3], "unread": [1, 1, 1], "label": ["p", "q", "p"]}
    steps = [{"imputer": {"columns": ["x"]}}, {"standard_scaler": {"columns": ["x"]}}, LEARN]
    source = Source.of(tmp_path, {"train/a.parquet": pa.table(rows)}, steps, label="label", columns=["x", "z", "label"])
    assert source.fit().steps[1].columns[0].center == 2.0


DECODE: dict[str, Any] = {"decode_image": {"column": "image"}}
LEARN: dict[str, Any] = {"label_encoder": {"column": "label"}}
CODE = """\
def same(batch):
    return batch
"""


def test_fit_before_decode_image_decodes_nothing(tmp_path: Path) -> None:
    columns = {"image": [b"not an image"] * 10, "label": ["a", "b"] * 5}
    source = Source.of(tmp_path, {"train/a.parquet": pa.table(columns)}, [LEARN, DECODE], label="label", invalid="drop")
    assert source.fit().classes == ("a", "b")


COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"


def test_class_in_two_unicode_forms_refused(tmp_path: Path) -> None:
    files = {"a.csv": f"x,y\n1,{COMPOSED}\n2,{DECOMPOSED}\n3,tea\n"}
    source = Source.of(tmp_path, files, ["label_encoder"], format="csv", train=".", label="y")
    with pytest.raises(DataError, match=r"in two Unicode forms: 'cafe\\u0301' and 'caf\\xe9'"):
        source.materialize()


def test_class_in_other_unicode_form_than_train_is_shown(tmp_path: Path) -> None:
    files = {"train/a.csv": f"x,y\n1,{COMPOSED}\n2,tea\n", "test/a.csv": f"x,y\n1,{DECOMPOSED}\n"}
    source = Source.of(tmp_path, files, ["label_encoder"], format="csv", train="train", test="test", label="y")
    with pytest.raises(DataError, match=r"'cafe\\u0301', in another Unicode form than 'caf\\xe9'"):
        source.materialize()


def test_class_folders_in_two_unicode_forms_are_one_class(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    for number, (split, name) in enumerate(
        [("train", COMPOSED), ("train", DECOMPOSED), ("train", "tea"), ("test", DECOMPOSED)]
    ):
        content = io.BytesIO()
        Image.new("L", (4, 4), number).save(content, "PNG")
        files[f"{split}/{name}/{number}.png"] = content.getvalue()
    source = Source.of(tmp_path, files, ["label_encoder"], format="images", train="train", test="test", label="label")
    assert source.materialize().feed_schema.classes == (COMPOSED, "tea")


@pytest.mark.parametrize("step", [{"ordinal": {"columns": "*"}}, {"one_hot": {"columns": "*"}}])
def test_star_leaves_out_names_of_files(tmp_path: Path, step: dict[str, Any]) -> None:
    held = io.BytesIO()
    Image.new("RGB", (4, 4)).save(held, "PNG")
    files = {f"train/{kind}/{row}.png": held.getvalue() for kind in ("cat", "dog") for row in range(2)}
    with pytest.raises(DataError, match=r"`\*` matches no column"):
        Source.of(tmp_path, files, ["label_encoder", step], format="images", label="label").materialize()
