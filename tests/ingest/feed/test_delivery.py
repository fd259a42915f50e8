"""Do batches arrive where they were asked for, cast there, and is the feed's place exact meanwhile?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import SpecError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.feed.cached import CachedFeed
from penstock.ingest.open_feed import open_feed
from penstock.storage import Storage
from tests.conformance.feed_cases import ROWS, values_of, write_dataset
from tests.gpu import needs_gpu

SCALE = [1 / 255, 2.0, 0.5]


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    storage = Storage(str(tmp_path / "store"))
    manifest = write_dataset(storage, tmp_path / "scratch", 3, lists=True)
    storage.write_json(f"datasets/{manifest.key}/manifest.json", manifest.model_dump(mode="json"))
    return f"{tmp_path}/store/datasets/{manifest.key}"


def opened(dataset: str, **options: Any) -> CachedFeed:
    return open_feed(dataset, batch_rows=64, seed=3, rank=0, world_size=1, **options)


def floats_of(batch: Batch) -> np.ndarray:
    return values_of(batch.row_ids)["image"].astype(np.float32) * np.array(SCALE, np.float32) - np.float32(0.25)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_column_becomes_float_on_the_way(dataset: str, prefetch: int) -> None:
    feed = opened(dataset, as_float={"image": (SCALE, -0.25), "tokens": (2, 1)}, prefetch=prefetch)
    plain = opened(dataset)
    for batch, other in zip(feed.batches(1), plain.batches(1), strict=True):
        assert batch.columns["image"].dtype == torch.float32
        assert np.array_equal(batch.columns["image"].numpy(), floats_of(batch))
        assert torch.equal(batch.columns["tokens"], other.columns["tokens"].float() * 2 + 1)
        assert torch.equal(batch.columns["x"], other.columns["x"])
        assert batch.columns["label"].dtype == torch.int64


def test_scaling_float_column_leaves_source_unchanged(dataset: str) -> None:
    feed = opened(dataset, as_float={"x": (2.0, 1.0)}, augment=lambda columns, _: {**columns, "before": columns["x"]})
    for batch in feed.batches(0):
        assert torch.equal(batch.columns["before"] * 2 + 1, batch.columns["x"])


def test_augment_sees_the_stored_values(dataset: str) -> None:
    seen: list[torch.dtype] = []

    def augment(columns: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
        seen.append(columns["image"].dtype)
        return columns

    batch = next(opened(dataset, as_float={"image": (1, 0)}, augment=augment).batches(0))
    assert set(seen) == {torch.uint8}
    assert batch.columns["image"].dtype == torch.float32


def test_position_is_that_of_yielded_batch(dataset: str) -> None:
    feed = opened(dataset, as_float={"image": (SCALE, 0)})
    batches = feed.batches(0)
    for _ in range(5):
        batch = next(batches)
    assert feed.state_dict()["position"] == batch.position == 320
    again = opened(dataset)  # how batches are delivered is no part of the place
    epoch, position = again.load_state_dict(feed.state_dict())
    assert np.array_equal(next(again.batches(epoch, position)).row_ids, next(batches).row_ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"as_float": {"nothing": (1, 0)}}, "names column 'nothing'; the columns are x, image, label, tokens, marks"),
        ({"as_float": {"image": ([1, 2], 0)}}, r"'image' is \(\[1, 2\], 0\)"),
        ({"as_float": {"label": ([1, 2], 0)}}, "'label' is"),
        ({"as_float": {"image": 255}}, "'image' is 255"),
        ({"as_float": {"image": ("wide", 0)}}, "'image' is"),
        ({"device": "gpu"}, "device 'gpu'"),
        pytest.param(
            {"device": "cuda"}, "device 'cuda'", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
        ),
    ],
)
def test_wrong_delivery_is_refused_when_feed_opens(dataset: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        opened(dataset, **options)


@needs_gpu
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_gpu_gets_the_same_batches_while_it_is_busy(dataset: str, prefetch: int) -> None:
    feed = opened(dataset, device="cuda", as_float={"image": (SCALE, -0.25)}, prefetch=prefetch)
    for epoch in range(3):
        sums, wanted = [], []
        for batch, other in zip(feed.batches(epoch), opened(dataset).batches(epoch), strict=True):
            assert {column.device.type for column in batch.columns.values()} == {"cuda"}
            torch.cuda._sleep(2_000_000)  # copies run ahead of the work; none may reach into memory that work still needs
            sums.append(torch.stack([batch.columns["x"].double().sum(), batch.columns["image"].double().sum()]))
            wanted.append([other.columns["x"].double().sum(), floats_of(other).astype(np.float64).sum()])
        assert len(sums) == -(-ROWS // 64)
        torch.testing.assert_close(torch.stack(sums).cpu(), torch.tensor(np.array(wanted)))


@needs_gpu
def test_rows_for_a_gpu_are_gathered_into_pinned_memory(dataset: str) -> None:
    pinned: list[bool] = []

    def augment(columns: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
        pinned.append(all(columns[name].is_pinned() for name in ("x", "image", "label")))
        return columns

    for _ in opened(dataset, device="cuda", augment=augment).batches(0):
        pass
    assert pinned and all(pinned)
