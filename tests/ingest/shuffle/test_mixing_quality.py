"""Is a batch of a window worth as many rows as we say? Simulated on rows that are stored sorted."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.ingest.shuffle.mixing_quality import mixes_like, window_runs
from penstock.ingest.shuffle.order import Order, make_order
from penstock.ingest.spec import ShuffleSpec

ROWS, BATCH = 1 << 18, 256


def worth(order: Order, run_rows: int, epochs: int = 60) -> float:
    """Rows drawn at random whose mean would scatter as the batches' does, where each run of stored rows has one value."""
    values = np.random.default_rng(1).random(-(-ROWS // run_rows))
    means = []
    for epoch in range(epochs):
        ids = order.ids(epoch, 0, ROWS)
        means.append(values[ids // run_rows].reshape(-1, BATCH).mean(axis=1))
    return float(values.var() / np.concatenate(means).var())


@pytest.mark.parametrize("window_rows", [1 << 11, 1 << 13, 1 << 16])
def test_a_window_of_rows(window_rows: int) -> None:
    spec = ShuffleSpec(mode="windowed", seed=3, window_rows=window_rows)
    order = make_order(spec, ROWS)
    runs = window_runs(spec, order, streamed=False)
    assert runs == 32
    said = mixes_like(BATCH, runs, window_rows, ROWS)
    assert worth(order, order.group_rows) == pytest.approx(said, rel=0.25)
    assert window_runs(spec, None, streamed=False) == runs


@pytest.mark.parametrize("per_window", [1, 4, 16])
def test_a_window_of_shards(per_window: int) -> None:
    shards = [1 << 12] * (ROWS >> 12)
    spec = ShuffleSpec(mode="windowed", seed=3, window_rows=per_window << 12, window_of="shards")
    order = make_order(spec, ROWS, shards)
    runs = window_runs(spec, order, streamed=False)
    assert runs == per_window
    assert worth(order, 1 << 12) == pytest.approx(mixes_like(BATCH, runs, per_window << 12, ROWS), rel=0.25)


def test_a_full_shuffle_is_worth_its_rows_and_a_stream_one() -> None:
    order = make_order(ShuffleSpec(seed=3), ROWS)
    assert worth(order, 1 << 12) == pytest.approx(BATCH, rel=0.1)
    assert mixes_like(BATCH, 32, 1 << 18, 1 << 18) == pytest.approx(BATCH)
    assert window_runs(ShuffleSpec(mode="windowed"), None, streamed=True) == 1
    assert mixes_like(BATCH, 1, 1 << 13) == pytest.approx(1)


def test_a_window_of_all_rows_is_a_full_shuffle() -> None:
    for rows in (350, 10_000):
        assert mixes_like(BATCH, 1, 1 << 18, rows) == min(BATCH, rows)
    assert mixes_like(512, 32, 1 << 18, 350) == 350


def test_a_batch_of_several_windows_is_worth_more_than_one() -> None:
    order = make_order(ShuffleSpec(mode="windowed", seed=3, window_rows=64), ROWS)
    # Thousands of windows take their time.
    assert worth(order, order.group_rows, epochs=10) == pytest.approx(mixes_like(BATCH, 32, 64, ROWS), rel=0.25)
