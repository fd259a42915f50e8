"""Do random generators come back as they were?"""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from torch import Tensor

from penstock.training.rng import capture_rng, restore_rng, rng_bytes, seed_rng
from penstock.training.state import TrainState
from tests.training.digits import CPU


def generators_of_format_3() -> dict[str, Tensor]:
    """What a checkpoint of format 2 or 3 holds of this process's generators."""
    version, numbers, gauss_next = random.getstate()
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": torch.tensor([version, *numbers]),
        "numpy": torch.tensor([position, has_gauss, *keys.tolist()]),
        "gauss": torch.tensor([math.nan if gauss_next is None else gauss_next, gauss], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), *np.random.rand(3).tolist(), np.random.randn(), *torch.rand(3).tolist()]


def test_generators_continue_where_they_were_captured() -> None:
    seed_rng(3, 1)
    draw()  # an odd number of gauss draws: numpy and python keep the second one of a pair
    captured, captured_before = capture_rng(CPU), rng_bytes(generators_of_format_3())
    expected = draw()
    for state in (captured, captured_before):
        seed_rng(99)
        restore_rng(torch.stack([torch.zeros_like(state), state])[1], CPU)
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
