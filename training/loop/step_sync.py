"""What do the ranks tell each other between steps, and how often?

One small sum over the ranks carries three things: rank 0's decisions (stop, save, when to meet next) and every rank's part of
the losses since the last one. All ranks then act alike, and no step waits for a collective of its own or for the device to
report a loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.training.ranks import Group

__all__ = ["Decision", "Exchange"]


INTERVAL_S = 0.25
"""Wanted time between exchanges: how fast a stop is obeyed and a chart moves."""

MAX_STEPS = 64
"""Most steps between exchanges; also the size of the message."""


@dataclass(frozen=True)
class Decision:
    """What all ranks do now."""

    stop: bool
    save: bool
    losses: list[float]
    """Global mean loss of each step since the last exchange."""


class Exchange:
    """Counts steps to the next exchange and performs it.

    Args:
        group: the ranks.
        wants: asked on rank 0 at each exchange: (stop, save).
        clock: monotonic seconds.
    """

    def __init__(
        self, group: Group, wants: Callable[[], tuple[bool, bool]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._group = group
        self._wants = wants
        self._clock = clock
        self._distance = 1
        self._losses: list[Tensor] = []
        self._last_s = clock()

    def record(self, loss: Tensor) -> None:
        """Remember this rank's part of a step's loss; it stays on the device."""
        self._losses.append(loss)

    @property
    def due(self) -> bool:
        """Whether the steps until the next exchange are done; the same on every rank."""
        return len(self._losses) >= self._distance

    def meet(self) -> Decision:
        """Exchange. A collective."""
        steps = len(self._losses)
        stop, save, distance = 0.0, 0.0, 0.0
        if self._group.is_first:
            wants_stop, wants_save = self._wants()
            stop, save, distance = float(wants_stop), float(wants_save), float(self._next_distance(steps))
        losses = torch.stack(self._losses).double().cpu().tolist() if steps else []
        message = [stop, save, distance, *losses, *[0.0] * (MAX_STEPS - steps)]
        summed = self._group.sum(message)
        self._losses.clear()
        self._distance = int(summed[2])
        return Decision(stop=summed[0] > 0, save=summed[1] > 0, losses=summed[3 : 3 + steps])

    def _next_distance(self, steps: int) -> int:
        now_s = self._clock()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        if steps == 0:
            return self._distance
        wanted = int(INTERVAL_S * steps / max(elapsed_s, 1e-6))
        return max(1, min(wanted, MAX_STEPS, 2 * max(self._distance, 1)))
