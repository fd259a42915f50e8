"""Do batches arrive where they were asked for, and is the feed's place exact meanwhile?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import SpecError
from penstock.ingest.feed.cached import CachedFeed
from penstock.ingest.open_feed import open_feed
from penstock.storage import Storage
from tests.conformance.feed_cases import ROWS, write_dataset


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    storage = Storage(str(tmp_path / "store"))
    manifest = write_dataset(storage, tmp_path / "scratch", 3, lists=True)
    manifest.write(storage)
    return f"{tmp_path}/store/datasets/{manifest.key}"


def opened(dataset: str, **options: Any) -> CachedFeed:
    return open_feed(dataset, batch_rows=64, seed=3, rank=0, world_size=1, **options)


def test_position_is_that_of_yielded_batch(dataset: str) -> None:
    feed = opened(dataset, prefetch=2)
    batches = feed.batches(0)
    for _ in range(5):
        batch = next(batches)
    assert feed.state_dict()["position"] == batch.position == 320
    again = opened(dataset)  # the place does not depend on the delivery of batches
    epoch, position = again.load_state_dict(feed.state_dict())
    assert np.array_equal(next(again.batches(epoch, position)).row_ids, next(batches).row_ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device 'gpu'"),
        pytest.param(
            {"device": "cuda"}, "device 'cuda'", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
        ),
    ],
)
def test_wrong_delivery_is_refused_when_feed_opens(dataset: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        opened(dataset, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_gpu_gets_the_same_batches_while_it_is_busy(dataset: str, prefetch: int) -> None:
    feed = opened(dataset, device="cuda", prefetch=prefetch)
    for epoch in range(3):
        sums, wanted = [], []
        for batch, other in zip(feed.batches(epoch), opened(dataset).batches(epoch), strict=True):
            assert {column.device.type for column in batch.columns.values()} == {"cuda"}
            torch.cuda._sleep(2_000_000)  # copies run ahead of the work; none may reach into memory that work still needs
            sums.append(torch.stack([batch.columns["x"].double().sum(), batch.columns["image"].double().sum()]))
            wanted.append([other.columns["x"].double().sum(), other.columns["image"].double().sum()])
        assert len(sums) == -(-ROWS // 64)
        torch.testing.assert_close(torch.stack(sums).cpu(), torch.tensor(np.array(wanted)))


@pytest.mark.gpu
def test_rows_for_a_gpu_are_gathered_into_pinned_memory(dataset: str) -> None:
    pinned: list[bool] = []

    def augment(columns: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
        pinned.append(all(columns[name].is_pinned() for name in ("x", "image", "label")))
        return columns

    for _ in opened(dataset, device="cuda", augment=augment).batches(0):
        pass
    assert pinned and all(pinned)
