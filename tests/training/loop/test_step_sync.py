"""Do ranks meet about four times a second, and does the message carry every step's loss?"""

from __future__ import annotations

import pytest
import torch

from penstock.training.loop.step_sync import INTERVAL_S, MAX_STEPS, Exchange
from penstock.training.ranks import Group
from tests.training.digits import CPU


class Clock:
    """Seconds that pass when told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def steps_between(step_s: float, meetings: int = 12) -> list[int]:
    """Steps from one exchange to the next, for steps that take `step_s`."""
    clock = Clock()
    exchange = Exchange(Group(0, 1, CPU), lambda: (False, False), clock)
    distances = []
    for _ in range(meetings):
        steps = 0
        while not exchange.due:
            exchange.record(torch.tensor(float(steps)))
            steps += 1
            clock.now_s += step_s
        decision = exchange.meet()
        assert decision.losses == [float(step) for step in range(steps)]
        distances.append(steps)
    return distances


def test_the_first_step_is_shared_at_once() -> None:
    assert steps_between(0.01)[0] == 1


def test_slow_steps_meet_every_time() -> None:
    assert set(steps_between(INTERVAL_S * 1.5)) == {1}


def test_quick_steps_settle_at_the_wanted_interval() -> None:
    assert steps_between(0.01)[-1] == pytest.approx(INTERVAL_S / 0.01, abs=1)


def test_no_message_grows_beyond_its_size() -> None:
    assert max(steps_between(0.0001)) == MAX_STEPS


def test_wishes_of_rank_0_become_decisions() -> None:
    wishes = [(False, True), (True, False)]
    exchange = Exchange(Group(0, 1, CPU), lambda: wishes.pop(0))
    exchange.record(torch.tensor(1.0))
    first, second = exchange.meet(), exchange.meet()
    assert (first.stop, first.save) == (False, True)
    assert (second.stop, second.save, second.losses) == (True, False, [])
