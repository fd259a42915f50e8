"""What does the loop tell the outside, and what does it ask of it?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from torch import Tensor

from penstock.ingest.feed.batch import Batch
from penstock.training.checkpoint.manifest import Checkpoint
from penstock.training.loop.step_sync import Decision
from penstock.training.ranks import Group
from penstock.training.rng import capture_rng
from penstock.training.state import TrainState

__all__ = ["Observer", "RankObserver", "StepTimes"]


@dataclass(frozen=True)
class StepTimes:
    """Where a step's time went, in seconds, and what it processed."""

    t_ms: int
    step_s: float
    data_wait_s: float
    global_rows: int
    learning_rate: float
    epoch: int


class Observer:
    """What the loop tells the outside, and asks of it. This one listens to nothing and saves nothing."""

    def wants(self) -> tuple[bool, bool]:
        """(stop, save) wishes of the outside, asked at each exchange on rank 0."""
        return False, False

    def batch(self, step: int, epoch: int, batch: Batch) -> None:
        """A batch is about to be learned."""

    def steps(self, last_step: int, times: list[StepTimes], met: Decision) -> None:
        """Steps were done, the last of them `last_step`."""

    def validated(self, step: int, metrics: dict[str, float]) -> None:
        """The model was validated."""

    def tell(self, message: str) -> None:
        """Something worth a line has happened."""

    def save(self, state: TrainState, measured: dict[str, float]) -> None:
        """Write a checkpoint of the state with the metrics measured on it. A collective; returns before it is committed."""


class RankObserver(Observer):
    """The observer of a rank that writes no checkpoint.

    Args:
        group: the ranks.
        rows_file: where row ids go, one JSON line per step, if they are recorded.
    """

    def __init__(self, group: Group, rows_file: IO[str] | None) -> None:
        self._group = group
        self._rows_file = rows_file
        self._sent: Callable[[], object] = lambda: None

    @property
    def exactness(self) -> str | None:
        """What the next checkpoint says of itself; known on rank 0."""
        return None

    def resumed(self, checkpoint: Checkpoint, warnings: list[str]) -> None:
        """Training continues from `checkpoint`."""

    def chance(self, operation: str) -> None:
        """An operation is used whose bits differ from time to time."""

    def batch(self, step: int, epoch: int, batch: Batch) -> None:
        """Record the rows before they are learned: a line more than learned is harmless, a line less would hide a row."""
        if self._rows_file is not None:
            record = {"step": step, "epoch": epoch, "first_row": batch.first_row, "rows": batch.row_ids.tolist()}
            self._rows_file.write(json.dumps(record) + "\n")
            self._rows_file.flush()

    def save(self, state: TrainState, measured: dict[str, float]) -> None:
        """Give this rank's random generators to rank 0. A collective."""
        self._sent()
        self._group.together(lambda: None)  # rank 0 may still be writing the checkpoint before
        self._sent = self._generators()

    def finish(self) -> str | None:
        """Wait for what is being written; the name of the last checkpoint written by this process, on rank 0."""
        self._sent()
        return None

    def _generators(self) -> Callable[[], Tensor]:
        """Begin to gather all ranks' random generators; the function waits for them: uint8[ranks, n]. A collective."""
        return self._group.gather(capture_rng(self._group.device))
