"""Do random generators come back as they were?"""

from __future__ import annotations

import random

import numpy as np
import torch

from penstock.training.rng import capture_rng, restore_rng, seed_rng
from penstock.training.state import TrainState
from tests.training.digits import CPU


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), *np.random.rand(3).tolist(), np.random.randn(), *torch.rand(3).tolist()]


def test_generators_continue_where_they_were_captured() -> None:
    seed_rng(3, 1)
    draw()  # an odd number of gauss draws: numpy and python keep the second one of a pair
    captured = capture_rng(CPU)
    expected = draw()
    seed_rng(99)
    restore_rng(torch.stack([torch.zeros_like(captured), captured])[1], CPU)
    assert draw() == expected
    seed_rng(5)
    assert len(capture_rng(CPU)) == len(captured)


def test_ranks_and_neighbouring_seeds_draw_differently() -> None:
    drawn = []
    for parts in [(3, 0), (3, 1), (4, 0), (3,)]:
        seed_rng(*parts)
        drawn.append(tuple(draw()))
    assert len(set(drawn)) == 4


def test_an_epochs_end_is_the_next_ones_beginning() -> None:
    state = TrainState().after_batch(10).after_batch(12).next_epoch()
    assert state == TrainState(step=2, epoch=1, position=0)
