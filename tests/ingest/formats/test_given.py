"""Which tables hold the rows that a program gives, whatever it holds them in?"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import ray
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from penstock.errors import DataError
from penstock.ingest.formats.arrow_files import keep_object
from penstock.storage import Storage

ROWS = {"x": [1, 2, 3], "text": ["a", None, "c"]}


class Stream:
    """Offers its rows as polars' frames do."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return pa.table(ROWS).__arrow_c_stream__(requested_schema)


class Hub:
    """Offers its rows as the datasets of Hugging Face do."""

    def with_format(self, kind: str) -> Hub:
        assert kind == "arrow"
        return self

    def iter(self, batch_size: int) -> Any:
        return (pa.table(ROWS).slice(start, 2) for start in (0, 2))


class Rows(Dataset[dict[str, Any]]):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in ROWS.items()}

    def __len__(self) -> int:
        return 3


def kept(value: Any, folder: Path) -> pa.Table:
    return ds.dataset(keep_object(value, Storage(str(folder)), "train"), format="ipc").to_table()


@pytest.mark.parametrize(
    "given",
    [
        *(pa.table(ROWS), pa.table(ROWS).to_pandas(), ROWS, Stream(), Hub(), Rows()),
        *([dict(zip(ROWS, row, strict=True)) for row in zip(*ROWS.values(), strict=True)], (Rows()[row] for row in range(3))),
        [{"x": 1, "text": "a"}, {"x": 2}, {"text": "c", "x": 3}],
    ],
    ids=["arrow", "pandas", "columns", "polars", "hugging face", "torch", "dicts", "iterator", "absent values"],
)
def test_rows_of_each_kind_are_kept_alike(tmp_path: Path, given: Any) -> None:
    assert kept(given, tmp_path).to_pydict() == ROWS


def test_pairs_of_a_torch_dataset_become_x_and_y(tmp_path: Path) -> None:
    table = kept(TensorDataset(torch.arange(12.0).reshape(3, 2, 2), torch.tensor([0, 1, 0])), tmp_path)
    assert table.column("y").to_pylist() == [0, 1, 0]
    assert table.schema.field("x").type.shape == [2, 2]
    pictures = [(Image.new("L", (4, 3), shade), shade) for shade in (0, 9)]
    assert kept(pictures, tmp_path).schema.field("x").type.shape == [3, 4]


def test_many_rows_one_by_one_make_few_tables(tmp_path: Path) -> None:
    table = kept(({"x": number, "half": np.float32(number / 2)} for number in range(20_000)), tmp_path)
    assert table.column("x").to_pylist() == [*range(20_000)] and table.schema.field("half").type == pa.float32()
    assert table.column("x").num_chunks <= 3


@pytest.mark.parametrize("given", [["a", "b"], [(1, 2, 3)], 7])
def test_other_objects_are_refused_with_what_is_taken(tmp_path: Path, given: Any) -> None:
    with pytest.raises(DataError) as refused:
        kept(given, tmp_path)
    assert "polars" in refused.value.next_step


def test_empty_frame_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data\\['train'\\] gave no rows"):
        keep_object(pa.table({"x": pa.array([], pa.int64())}), Storage(str(tmp_path)), "data['train']")


def test_cluster_writes_a_ray_dataset_in_order_of_blocks(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second_block_first(rows: dict[str, Any]) -> dict[str, Any]:
        first = int(rows["id"][0])
        ends = time.monotonic() + 60
        while first == 0 and not (tmp_path / "second").exists():
            assert time.monotonic() < ends
        (tmp_path / "second").write_text("") if first == 1000 else None
        return {**rows, "image": np.repeat(rows["id"], 64).reshape(-1, 8, 8).astype(np.float32)}

    fetched: list[int] = []
    get = ray.get

    def counting(*given: Any, **options: Any) -> Any:
        found = get(*given, **options)
        fetched.append(len(ray.cloudpickle.dumps(found)))
        return found

    monkeypatch.setattr(ray, "get", counting)
    dataset = ray.data.range(4000, override_num_blocks=4).map_batches(second_block_first, batch_size=None, num_cpus=0.4)
    storage, before = Storage(str(tmp_path / "storage")), dataset.context.execution_options.preserve_order
    uri = keep_object(dataset, storage, "train")
    rows = ds.dataset(uri, format="ipc").to_table()
    assert rows["id"].to_pylist() == [*range(4000)] and rows["image"].type.shape == (8, 8)
    assert len([*Path(uri).iterdir()]) > 1 and fetched and max(fetched) < 50_000 < rows.nbytes
    assert keep_object(dataset, storage, "train") == uri and len(storage.list("sources")) == 1
    assert dataset.context.execution_options.preserve_order == before
    with pytest.raises(DataError, match="gave no rows"):
        keep_object(dataset.filter(lambda row: False), storage, "train")
    assert len(storage.list("sources")) == 1
    with pytest.raises(DataError, match="column 'x' holds Python objects"):
        keep_object(dataset.map_batches(lambda rows: {"x": np.array([object()] * len(rows["id"]))}), storage, "train")
    assert len(storage.list("sources")) == 1, "a dataset that fails leaves nothing"


class Retried:
    """A dataset whose write task dies after two blocks, and gives one when Ray calls it again, as a random function may."""

    __module__ = "ray.data"
    context = SimpleNamespace(execution_options=SimpleNamespace(preserve_order=False), enable_progress_bars=True)

    def write_datasink(self, sink: Any) -> None:
        task = SimpleNamespace(task_idx=0)
        sink.write(iter([pa.table({"x": [1]}), pa.table({"x": [2]})]), task)
        sink.on_write_complete(SimpleNamespace(write_returns=[sink.write(iter([pa.table({"x": [1, 2]})]), task)]))


def test_retried_write_of_a_ray_dataset_leaves_no_row_twice(tmp_path: Path) -> None:
    assert kept(Retried(), tmp_path)["x"].to_pylist() == [1, 2]
