"""What do the ranks exchange between steps, and how often?

One small sum over the ranks carries rank 0's decisions (stop, save, when to meet next), every rank's part of the losses since
the last exchange, and how long each rank waited for rows. Values that user code logs follow in a second sum. All
ranks then act alike, and no step waits for a collective of its own or for the device to report a loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.training.own_values import OwnValues
from penstock.training.ranks import Group

__all__ = ["Decision", "Exchange"]

INTERVAL_S = 0.25
"""Wanted time between exchanges: a stop is obeyed and a chart moves within it."""

MAX_STEPS = 64
"""Most steps between exchanges; also the size of the message."""


@dataclass(frozen=True)
class Decision:
    """The decision that all ranks act on."""

    stop: bool
    save: bool
    end: bool
    """A callback of any rank wants training to be finished."""
    losses: list[float]
    """Global mean loss of each step since the last exchange."""
    own: list[dict[str, float]]
    """Values that user code logged in each of these steps, over all ranks."""
    waits_s: list[float]
    """Each rank's seconds of waiting for rows in a mean step."""


class Exchange:
    """Counts steps to the next exchange and performs it.

    Args:
        group: the ranks.
        wants: returns (stop, save); called on rank 0 at each exchange.
        clock: monotonic seconds.
        own: values that user code logs.
    """

    def __init__(
        self,
        group: Group,
        wants: Callable[[], tuple[bool, bool]],
        clock: Callable[[], float] = time.monotonic,
        own: OwnValues | None = None,
    ) -> None:
        self._group = group
        self._wants = wants
        self._clock = clock
        self._own = own or OwnValues(group, "train")
        self._wait_s = 0.0
        self._distance = 1
        self._losses: list[Tensor] = []
        self._last_s = clock()

    def record(self, loss: Tensor, data_wait_s: float = 0.0) -> None:
        """Keep this rank's part of a step's loss, which stays on the device, and its wait for rows."""
        self._losses.append(loss)
        self._wait_s += data_wait_s
        self._own.end_step()

    @property
    def due(self) -> bool:
        """Whether the steps until the next exchange are done; the same on every rank."""
        return len(self._losses) >= self._distance

    def meet(self, *, ends: bool = False) -> Decision:
        """Exchange; `ends` means that a callback of this rank wants training to be finished. A collective."""
        steps = len(self._losses)
        stop, save, distance = 0.0, 0.0, 0.0
        if self._group.is_first:
            wants_stop, wants_save = self._wants()
            stop, save, distance = float(wants_stop), float(wants_save), float(self._next_distance(steps))
        losses = torch.stack(self._losses).double().cpu().tolist() if steps else []
        waits_s = [0.0] * self._group.world_size
        waits_s[self._group.rank] = self._wait_s / max(steps, 1)
        head = [stop, save, distance, float(ends), float(self._own.new_names), *waits_s]
        summed = self._group.sum([*head, *losses, *[0.0] * (MAX_STEPS - steps)])
        stop, save, distance, end, new_names, *waits_s = summed[: len(head)]
        self._losses.clear()
        self._wait_s = 0.0
        self._distance = int(distance)
        if new_names:
            self._own.agree()
        return Decision(
            stop=stop > 0,
            save=save > 0,
            end=end > 0,
            losses=summed[len(head) : len(head) + steps],
            own=self._own.add_up(steps),
            waits_s=waits_s,
        )

    def _next_distance(self, steps: int) -> int:
        now_s = self._clock()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        if steps == 0:
            return self._distance
        wanted = int(INTERVAL_S * steps / max(elapsed_s, 1e-6))
        return max(1, min(wanted, MAX_STEPS, 2 * max(self._distance, 1)))
