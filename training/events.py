"""Which events does training publish while it runs, and how do subscribers of the driver receive them?"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ConfigDict

from penstock.config import Section

__all__ = [
    "CheckpointCommitted",
    "Event",
    "Failure",
    "Handlers",
    "Notice",
    "Point",
    "Printed",
    "Reported",
    "Resumed",
    "Saving",
    "ShardsFetched",
    "Shown",
    "TrainProgress",
    "Warned",
    "WorkerStarted",
    "WorkersLost",
    "WorkersStarting",
    "now_ms",
    "publish",
]


class Point(NamedTuple):
    """Metric values of one step, with the time they were measured. The time is part of a point's identity on the server."""

    t_ms: int
    """Wall clock, milliseconds since 1970."""
    step: int
    """Optimizer steps done."""
    values: Mapping[str, float]


class TrainProgress(Section):
    """How far training is, a few times a second."""

    step: int
    total_steps: int | None
    epoch: int
    rows_per_s: float


class CheckpointCommitted(Section):
    """A checkpoint is committed: from now on a kill loses nothing before `step`."""

    name: str
    step: int


class Reported(Section):
    """What a function has reported on every rank, with the values that penstock adds (docs/ray-train.md)."""

    step: int
    ranks: tuple[dict[str, Any], ...]


class Shown(Section):
    """An image or text that a function has reported on rank 0."""

    name: str
    """Path among the files of the tracked run."""
    content: bytes


class Saving(Section):
    """Rank 0 has copied the state of `step` and is writing it, until `CheckpointCommitted`."""

    step: int


class Resumed(Section):
    """Training continues from a checkpoint."""

    step: int
    checkpoint: str
    exactness: str
    warnings: tuple[str, ...] = ()


class WorkerStarted(Section):
    """A rank's process is up; `restart` counts the worker groups before this one within the attempt."""

    rank: int
    host: str
    pid: int
    restart: int
    node: str = ""
    """Ray's id of its node."""


class WorkersStarting(Section):
    """CPUs and GPUs are requested for a worker group, at the start or after a loss."""


class WorkersLost(Section):
    """Ray has lost workers, and all are restarted."""

    ranks: tuple[int, ...]
    restart: int
    who: str = ""
    """The ranks that ended without an error, and their processes, for a message."""


class Notice(Section):
    """A line of information, such as the device, why training ends early, or the place of every rank if it stands still."""

    message: str
    blamed: str = ""
    """Where training stands still, the places of the ranks that do not wait for others."""


class Warned(Section):
    """A warning that does not stop training."""

    message: str


class Printed(Section):
    """Printed, warned and logged lines of user code on a rank."""

    rank: int
    lines: tuple[str, ...]


class ShardsFetched(Section):
    """Shards that a rank's process has fetched so far for this training."""

    rank: int
    host: str
    pid: int
    bytes: int
    """That came from the store into the node's cache."""
    wait_s: float
    """Seconds that the rank's feeds waited for shards."""


class Failure(Section):
    """A rank fails with an exception. `error` is set if a user can act on it."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    rank: int
    final: bool
    """Whether a restart would fail again, as with a bug in the recipe or a bad row."""
    text: str
    error: Exception | None = None


Event = (
    Point
    | TrainProgress
    | Reported
    | Shown
    | Saving
    | CheckpointCommitted
    | Resumed
    | WorkersStarting
    | WorkerStarted
    | WorkersLost
    | Notice
    | Warned
    | Printed
    | ShardsFetched
    | Failure
)

Handlers = Mapping[type[Any], Callable[[Any], object]]
"""Handlers of a subscriber, by the type of the event."""


def publish(events: Sequence[Event], *subscribers: Handlers) -> None:
    """Call the handlers of each event's type, in the order of the events and of the subscribers."""
    for event in events:
        for handlers in subscribers:
            if (handle := handlers.get(type(event))) is not None:
                handle(event)


def now_ms(clock: Callable[[], float] = time.time) -> int:
    """Wall-clock milliseconds since 1970."""
    return int(clock() * 1000)
