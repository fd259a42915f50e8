"""Does a shard give what Ray's own iterator gives: rows, types, shapes and devices, in every format, walk after walk?"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import functools
import importlib
import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray
import ray.data
import ray.train
import ray.train.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.data.collate_fn import ArrowBatchCollateFn, NumpyBatchCollateFn, PandasBatchCollateFn
from ray.data.extensions import ArrowTensorArray

from penstock.errors import SpecError
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.feed.cached import open_cached_feed
from penstock.ingest.feed.stream import MemoryFeed, StreamFeed
from penstock.ingest.materialize.without_disk import RowSource
from penstock.ingest.open_feed import FeedDataset
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import MaterializeSpec, ShuffleSpec
from penstock.progress import silent
from penstock.training.frameworks.ray_train.old_names import refuse_absent_datasets
from penstock.training.session.shard import Shard
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import capture
from tests import ROOT
from tests.ingest.preparing import Source
from tests.runs.forked import fork_workers_from_here
from tests.training.digits import CPU
from tests.training.test_ray_train import loop_job, session_of

ROWS = 23


def every_kind() -> dict[str, pa.Array]:
    """Columns of all kinds, some with nulls."""
    numbers = np.arange(ROWS)
    words = [None if row % 7 == 3 else "wörter " * (row % 4) for row in range(ROWS)]
    times = [dt.datetime(2026, 11, 28, 12, 0, row) for row in range(ROWS)]
    return {
        "int64": pa.array(numbers),
        "uint8": pa.array(numbers.astype(np.uint8)),
        "float32": pa.array(numbers.astype(np.float32) / 3),
        "bool": pa.array([None if row % 5 == 4 else row % 3 == 0 for row in range(ROWS)]),
        "map": pa.array([[(str(row), row)] * (row % 3) for row in range(ROWS)], pa.map_(pa.string(), pa.int32())),
        "code": pa.array([f"{row:04}".encode() for row in range(ROWS)], pa.binary(4)),
        "image": tensor_array(numbers.repeat(6).reshape(ROWS, 2, 3).astype(np.float32)),
        "text": pa.array(words),
        "bytes": pa.array([None if word is None else word.encode() for word in words]),
        "time": pa.array(times, pa.timestamp("us")),
        "zoned": pa.array(times, pa.timestamp("ns", "Europe/Berlin")),
        "date": pa.array([time.date() for time in times]),
        "span": pa.array([dt.timedelta(seconds=row) for row in range(ROWS)]),
        "decimal": pa.array([decimal.Decimal(row) / 4 for row in range(ROWS)], pa.decimal128(9, 2)),
        "equal": pa.array([[row, row + 1] for row in range(ROWS)], pa.list_(pa.float32())),
        "ragged": pa.array([list(range(row % 4)) for row in range(ROWS)], pa.list_(pa.int32())),
        "words": pa.array([None if word is None else word.split() for word in words], pa.list_(pa.string())),
        "struct": pa.array([{"a": row, "b": [str(row)] * (row % 3)} for row in range(ROWS)]),
        "structs": pa.array([[{"x": row}] * (row % 3) for row in range(ROWS)]),
    }


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return pa.table(every_kind())


@pytest.fixture(scope="module")
def rays(table: pa.Table) -> Iterator[Callable[[list[str]], ray.data.DataIterator]]:
    """Gives Ray's own iterator over some columns."""
    fork_workers_from_here()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True  # else batches come as threads are ready
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    image = ArrowTensorArray.from_numpy(table["image"].combine_chunks().to_numpy_ndarray())  # as Ray makes it of arrays
    rays = table.set_column(table.column_names.index("image"), "image", image)
    yield lambda columns: ray.data.from_arrow(rays.select(columns)).iterator()
    print("walks compared:", dict(counts))
    ray.shutdown()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, table: pa.Table) -> Source:
    """The same rows, prepared from three files into shards of some rows each."""
    files = {f"train/{part}.parquet": table.slice(part * 8, 8) for part in range(3)}
    return Source.of(tmp_path_factory.mktemp("rows"), files, any_type=True)


@pytest.fixture(scope="module")
def prepared(source: Source) -> Any:
    return source.materialize()


def shard_of(source: Source, manifest: Any, columns: list[str], mode: str = "none", **more: Any) -> Shard:
    """The shard of a worker that is alone."""
    order = make_order(ShuffleSpec(mode=mode), ROWS)
    schema = manifest.feed_schema.model_copy(update={"columns": tuple(manifest.feed_schema[name] for name in columns)})

    def open_feed(rows: int, device: torch.device) -> Any:
        feed = open_cached_feed([(source.storage, manifest)], "train", batch_rows=rows, order=order, columns=columns)
        feed.deliver_to(device)
        return feed

    return Shard("train", schema, ROWS, 1, open_feed, CPU, **more)


def check_same(ours: Any, rays: Any) -> None:
    """Fail unless two batches are of the same types, dtypes, shapes, devices and values."""
    assert type(ours) is type(rays)
    if isinstance(ours, dict):
        assert list(ours) == list(rays)
        for name in ours:
            check_same(ours[name], rays[name])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(rays)
        for one, other in zip(ours, rays, strict=True):
            check_same(one, other)
    elif isinstance(ours, np.ndarray):
        assert (ours.dtype, ours.shape) == (rays.dtype, rays.shape)
        if ours.dtype == object:
            check_same(ours.tolist(), rays.tolist())
        else:
            np.testing.assert_array_equal(ours, rays)
    elif isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.device) == (rays.dtype, rays.shape, rays.device) and torch.equal(ours, rays)
    elif isinstance(ours, pd.DataFrame):
        check_same(ours.dtypes.to_dict(), rays.dtypes.to_dict())
        check_same({name: list(ours[name]) for name in ours}, {name: list(rays[name]) for name in rays})
    elif isinstance(ours, pa.Table):
        assert ours.schema == rays.schema
        check_same(ours.to_pydict(), rays.to_pydict())
    else:
        assert ours is rays or ours == rays or (ours != ours and rays != rays)


def test_row_of_packed_lists_has_its_own_list(tmp_path: Path) -> None:
    lists = [list(range(row % 3)) for row in range(ROWS)]
    files = {"train/0.parquet": pa.table({"list": pa.array(lists, pa.list_(pa.int32())), "y": list(range(ROWS))})}
    source = Source.of(tmp_path, files, [{"ragged": {"columns": ["list"], "batch": "packed"}}])
    rows = list(shard_of(source, source.materialize(), ["list", "y"]).iter_rows())
    assert [row["list"].tolist() for row in rows] == lists and all(row.keys() == {"list", "y"} for row in rows)


class Rows(ArrowBatchCollateFn):  # type: ignore[misc]
    def __call__(self, batch: pa.Table) -> Any:
        return torch.as_tensor([batch.num_rows])


class Frames(PandasBatchCollateFn):  # type: ignore[misc]
    def __call__(self, batch: pd.DataFrame) -> Any:
        return {"rows": torch.as_tensor(len(batch)), "columns": list(batch.columns)}


class Arrays(NumpyBatchCollateFn):  # type: ignore[misc]
    def __call__(self, batch: dict[str, np.ndarray]) -> Any:
        return [torch.as_tensor(len(values)) for values in batch.values()]


def tokens(batch: dict[str, np.ndarray]) -> Any:
    """What a tokenizer does with the text of a batch."""
    return {name: [str(value).split() for value in values] for name, values in batch.items()}


WALKS = {
    "iter_batches": {"batch_format": st.sampled_from(["default", "numpy", "pandas", "pyarrow", None])},
    "iter_torch_batches": {"collate_fn": st.sampled_from([None, tokens, Rows(), Frames(), Arrays()])},
    "iter_rows": {},
}

counts: Counter[str] = Counter()


@st.composite
def walks(draw: st.DrawFn) -> tuple[list[str], str, dict[str, Any], list[int | None]]:
    """Columns, method, its arguments, and of each walk after how many batches it is left."""
    columns = draw(st.lists(st.sampled_from([*every_kind()]), min_size=1, max_size=5, unique=True))
    method = draw(st.sampled_from([*WALKS]))
    arguments = {name: draw(values) for name, values in WALKS[method].items()}
    if method != "iter_rows":
        arguments |= {"batch_size": draw(st.sampled_from([1, 4, 8, 23, 40])), "drop_last": draw(st.booleans())}
        arguments |= {"prefetch_batches": draw(st.integers(0, 3))}
    if method == "iter_torch_batches":
        arguments["device"] = draw(st.sampled_from(["auto", "cpu", torch.device("cpu")]))
        if arguments["collate_fn"] is None:
            arguments["dtypes"] = draw(st.sampled_from([None, torch.float32, {columns[0]: torch.float64}]))
    return columns, method, arguments, draw(st.lists(st.sampled_from([None, 1, 2]), min_size=1, max_size=3))


def walked(loader: Any, left_after: int | None) -> Any:
    """The batches of a walk, or that there are none."""
    try:
        batches = iter(loader)
        return [batch for _, batch in zip(range(10**6 if left_after is None else left_after), batches, strict=False)]
    except Exception:
        return "refused"


def test_arguments_of_rays_methods_are_all_there() -> None:
    """A new argument of Ray's is refused by nobody: it must be looked at."""
    methods = ("iter_batches", "iter_torch_batches", "iter_rows", "iter_tf_batches", "iter_jax_batches", "to_torch", "to_tf")
    for method in (*methods, "materialize", "schema", "stats", "get_context"):
        ours, rays = (inspect.signature(getattr(kind, method)) for kind in (Shard, ray.data.DataIterator))
        assert [*ours.parameters] == [*rays.parameters], method
        defaults = {name: parameter.default for name, parameter in rays.parameters.items()}
        assert {name: parameter.default for name, parameter in ours.parameters.items()} == defaults, method
    known = {*methods, "materialize", "schema", "stats", "get_context"}
    assert {name for name in dir(ray.data.DataIterator) if not name.startswith("_")} == known


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(walk=walks())
def test_walks_give_what_rays_iterator_gives(
    walk: Any, rays: Callable[[list[str]], Any], source: Source, prepared: Any
) -> None:
    columns, method, arguments, lengths = walk
    ours, theirs = shard_of(source, prepared, columns), rays(columns)
    loader, rays_loader = (getattr(shard, method)(**arguments) for shard in (ours, theirs))
    for left_after in lengths:
        one, other = walked(loader, left_after), walked(rays_loader, left_after)
        check_same(one, other)
        counts.update({method: 1, f"{method} refused": one == "refused", "batches": len(one)})


def test_resumed_text_goes_on_with_next_rows(source: Source, prepared: Any) -> None:
    columns = ["text", "int64", "words"]
    whole = shard_of(source, prepared, columns, "global")
    first, second = ([*whole.iter_batches(batch_size=5, batch_format="pyarrow")] for _ in range(2))
    assert first[0]["text"] != second[0]["text"], "another epoch, another order"
    resumed = shard_of(source, prepared, columns, "global", start=(0, 10))
    for expected in (first[2:], second):
        given = [*resumed.iter_batches(batch_size=5, batch_format="pyarrow")]
        assert pa.concat_tables(given) == pa.concat_tables(expected)
    rows = pa.concat_tables(first).sort_by("int64")
    assert rows["text"].to_pylist() == every_kind()["text"].to_pylist()


def test_function_that_collates_is_not_warned_of(source: Source, prepared: Any, recwarn: pytest.WarningsRecorder) -> None:
    shard = shard_of(source, prepared, ["text"])
    assert next(iter(shard.iter_torch_batches(batch_size=2, collate_fn=tokens))) and not recwarn.list


def test_text_without_collate_fn_is_refused_by_name(source: Source, prepared: Any) -> None:
    shard = shard_of(source, prepared, ["int64", "text", "time"])
    with pytest.raises(SpecError, match=r"cannot make tensors of text \(string\), time \(timestamp\[us\]\)") as refused:
        next(iter(shard.iter_torch_batches()))
    assert "pass a collate_fn" in str(refused.value.next_step)


def test_rays_own_methods_work_on_the_shard(source: Source, prepared: Any) -> None:
    shard = shard_of(source, prepared, ["int64", "float32", "image"])
    features, labels = next(iter(shard.to_torch(label_column="int64", feature_columns=["float32"], batch_size=4)))
    assert features.shape == (4, 1) and labels.flatten().tolist() == [0, 1, 2, 3]
    assert isinstance(shard, ray.data.DataIterator) and shard.schema().names == ["int64", "float32", "image"]
    with pytest.raises(SpecError, match=r"has no random_shuffle\(\)"):
        shard.random_shuffle()
    assert not hasattr(shard, "no_method_of_rays")


def test_text_in_memory_and_in_streams_equals_text_on_disk(rays: Any, source: Source, prepared: Any) -> None:
    rows, order = RowSource(source.preparation(), MaterializeSpec()), make_order(ShuffleSpec(mode="none"), ROWS)
    options: Any = {"order": order, "batch_rows": 5, "columns": ["text", "structs", "int64"]}
    _, datasets = rows.put("key", silent)
    units = rows.units(rows.describe("key", silent), "train")

    def tables(_epoch: int, _row: int) -> tuple[int, Iterator[pa.Table]]:
        return 0, (table for unit in units for table in rows.tables("train", unit))

    streamed = StreamFeed(tables, prepared.feed_schema, "train", content="rows", **options)
    on_disk = open_cached_feed([(source.storage, prepared)], "train", **options)
    for feed in (MemoryFeed(datasets["train"], **options), streamed):
        for ours, theirs in zip(feed.batches(0), on_disk.batches(0), strict=True):
            assert ours.arrow == theirs.arrow and torch.equal(ours.columns["int64"], theirs.columns["int64"])


def test_further_datasets_are_given_by_their_names(tmp_path: Path) -> None:
    names = ("train", "valid", "extra", "more", "most")
    files = {f"{name}/part.parquet": pa.table({"x": np.arange(4 + 2 * number)}) for number, name in enumerate(names)}
    source = Source.of(tmp_path, files, datasets={name: name for name in names[1:]}, any_type=True)
    manifest = source.materialize()
    assert manifest.rows == {"train": 4, "validation": 6, "test": 0, "extra": 8, "more": 10, "most": 12}
    job = replace(loop_job(tmp_path), data_storage=source.storage, manifest=manifest)
    session = session_of(job, 0)
    assert session.shard("valid") is session.shard("validation")
    assert [row["x"] for row in session.shard("most").iter_rows()] == [0, 1, 2, 3, 4, 5], "the first of two ranks"
    whole = session_of(replace(job, spec=TrainSpec(loop="loops.py:f", datasets={"extra": "whole"})), 0)
    assert len([*whole.shard("extra").iter_rows()]) == 8 and whole.shard("most").count() == 12
    with pytest.raises(SpecError, match="'extra', 'more', 'most'"):
        session.shard("absent")


FUNCTION = """
import ray.train

def train_func(config):
    train, valid = (ray.train.get_dataset_shard(name) for name in ("train", "valid"))
    rows = ray.train.get_dataset_shard("holdout").iter_batches()
    for epoch in range(config["epochs"]):
        ray.train.get_dataset_shard("maybe")
    if config.get("more"):
        ray.train.get_dataset_shard("perhaps")

def other():
    ray.train.get_dataset_shard("never")
"""


def test_dataset_that_nothing_gives_is_named_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(FUNCTION)
    code = capture("loop.py:train_func", tmp_path)
    refuse_absent_datasets(code, ["train", "holdout"])
    with pytest.raises(SpecError, match=r"does not exist; there are train, test") as refused:
        refuse_absent_datasets(code, ["train", "test"])
    assert refused.value.problems == ("loop.py:6: get_dataset_shard('holdout')",)


def of_ray(dotted: str) -> Any:
    """The thing of the installed Ray that a dotted name means."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            return functools.reduce(getattr, parts[length:], importlib.import_module(".".join(parts[:length])))
    raise ImportError(dotted)


def test_calls_of_the_page_exist_in_ray_and_none_is_missing() -> None:
    page = (ROOT / "docs" / "ray-train.md").read_text(encoding="utf-8").partition("## Every call")[2]
    calls = re.findall(r"`(ray\.[\w.]+)(?:\(([\w, ]*)\))?`", page)
    for dotted, args in calls:
        assert set(filter(None, args.split(", "))) <= {*inspect.signature(of_ray(dotted)).parameters}, dotted
    arguments = {f"{dotted}:{each}" for dotted, args in calls for each in args.split(", ")}
    assert {f"ray.train.report:{each}" for each in inspect.signature(ray.train.report).parameters} <= arguments
    torch_batches = "ray.data.DataIterator.iter_torch_batches"
    assert {f"{torch_batches}:{each}" for each in [*inspect.signature(of_ray(torch_batches)).parameters][1:]} <= arguments
    functions = [f"ray.train.{name}" for name in ray.train.__all__ if name.startswith("get_")]
    functions += [f"ray.train.torch.{name}" for name in ray.train.torch.__all__ if name.islower()]
    functions += [f"ray.data.DataIterator.{name}" for name in dir(ray.data.DataIterator) if not name.startswith("_")]
    assert not {*functions} - {dotted for dotted, _ in calls}


def test_feed_dataset_refuses_text_by_name(source: Source, prepared: Any) -> None:
    order = make_order(ShuffleSpec(mode="none"), ROWS)
    feed = open_cached_feed([(source.storage, prepared)], "train", batch_rows=4, order=order, columns=["int64", "text"])
    assert next(feed.batches(0)).arrow["text"].to_pylist() == every_kind()["text"].to_pylist()[:4]
    with pytest.raises(SpecError, match="tensors cannot hold text: string"):
        FeedDataset(feed)
