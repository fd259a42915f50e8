"""Are a row's random numbers its own, the same wherever it is read, and as random as they should be?"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from penstock.ingest.shuffle.row_generator import RowGenerator

ROWS = np.arange(20_000)


def drawn(seed: int = 5, epoch: int = 2, rows: np.ndarray = ROWS) -> list[Tensor]:
    generator = RowGenerator(seed, epoch, rows)
    return [generator.random(), generator.normal(3), generator.integers(-2, 5, 2, 2), generator.random(0), generator.random(1)]


def test_a_row_draws_the_same_in_any_batch() -> None:
    whole = drawn()
    chosen = np.array([19_999, 3, 3, 70])
    for all_rows, some in zip(whole, drawn(rows=chosen), strict=True):
        assert torch.equal(all_rows[chosen], some)
    assert [list(values.shape) for values in drawn(rows=chosen)] == [[4], [4, 3], [4, 2, 2], [4, 0], [4, 1]]
    assert [values.dtype for values in whole] == [torch.float32, torch.float32, torch.int64, torch.float32, torch.float32]
    assert RowGenerator(1, 0, ROWS[:0]).normal(7).shape == (0, 7)


def test_these_numbers_do_not_change_with_a_version() -> None:
    generator = RowGenerator(17, 3, np.array([0, 1, 1 << 40]))
    assert generator.integers(0, 1000, 2).tolist() == [[875, 92], [775, 869], [145, 684]]
    assert generator.normal().tolist() == pytest.approx([0.79989165, -0.10947586, -0.11711659], abs=1e-7)
    assert generator.random().tolist() == [0.9248530268669128, 0.3465573191642761, 0.3840332627296448]


def test_seeds_epochs_rows_and_draws_are_unrelated() -> None:
    first = RowGenerator(5, 2, ROWS).random()
    again = RowGenerator(5, 2, ROWS)
    again.random()
    for other in (RowGenerator(6, 2, ROWS).random(), RowGenerator(5, 3, ROWS).random(), again.random(), first.roll(1)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.03  # 4 standard deviations of 20,000 pairs


def test_numbers_have_documented_distribution() -> None:
    generator = RowGenerator(1, 0, ROWS)
    uniform, normal, integers = generator.random(5).numpy(), generator.normal(5).numpy(), generator.integers(-3, 4, 5).numpy()
    assert uniform.min() >= 0 and uniform.max() < 1
    assert stats.kstest(uniform.ravel(), "uniform").pvalue > 1e-4
    assert stats.kstest(normal.ravel(), "norm").pvalue > 1e-4
    assert (integers.min(), integers.max()) == (-3, 3)
    assert stats.chisquare(np.bincount(integers.ravel() + 3)).pvalue > 1e-4
    assert stats.kstest(uniform[:, 0], uniform[:, 1]).pvalue > 1e-4


def test_wide_ranges_are_as_even_as_narrow_ones() -> None:
    values = RowGenerator(1, 0, np.arange(300_000)).integers(0, 3 << 30).numpy()
    assert stats.chisquare(np.bincount(values % 3)).pvalue > 1e-4
    assert stats.kstest(values / (3 << 30), "uniform").pvalue > 1e-4


def test_large_values_are_the_same_as_in_small_batches() -> None:
    whole = RowGenerator(4, 1, np.arange(40)).random(3, 90, 90)  # more per row than is made at once
    assert torch.equal(whole[7:9], RowGenerator(4, 1, np.array([7, 8])).random(3, 90, 90))
    assert len(whole[0].unique()) > 0.99 * 3 * 90 * 90


@pytest.mark.parametrize(("low", "high"), [(3, 3), (4, 3), (0, (1 << 32) + 1)])
def test_a_range_without_integers_is_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match=rf"integers\({low}, {high}\)"):
        RowGenerator(0, 0, ROWS).integers(low, high)
