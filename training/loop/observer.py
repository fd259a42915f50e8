"""Which calls does the loop make to report steps, to save, and to learn about a stop?"""

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

__all__ = ["Observer", "StepTimes"]


@dataclass(frozen=True)
class StepTimes:
    """Times of a step in seconds, and the rows that it processed."""

    t_ms: int
    step_s: float
    data_wait_s: float
    global_rows: int
    learning_rate: float
    epoch: int


class Observer:
    """The observer of a rank that writes no checkpoint: it takes part in a save.

    Args:
        group: the ranks.
        rows_file: gets the row ids, one JSON line per step, if they are recorded.
    """

    def __init__(self, group: Group, rows_file: IO[str] | None) -> None:
        self._group = group
        self._rows_file = rows_file
        self._sent: Callable[[], object] = lambda: None

    def wants(self) -> tuple[bool, bool]:
        """Return whether to (stop, save); called on rank 0 at each exchange."""
        return False, False

    def steps(self, last_step: int, times: list[StepTimes], met: Decision) -> None:
        """Report steps, the last of which is `last_step`."""

    def validated(self, step: int, metrics: dict[str, float]) -> None:
        """Report a validation."""

    def notify(self, message: str) -> None:
        """Report a line of text."""

    @property
    def exactness(self) -> str | None:
        """The `exactness` that the next checkpoint will record; known on rank 0."""
        return None

    def resumed(self, checkpoint: Checkpoint, warnings: list[str]) -> None:
        """Report that training continues from `checkpoint`."""

    def nondeterministic_op(self, operation: str) -> None:
        """Note that a nondeterministic operation was used."""

    def batch(self, step: int, epoch: int, batch: Batch) -> None:
        """Record the rows before the step: a line too many is harmless, a line too few would hide a row."""
        if self._rows_file is not None:
            record = {"step": step, "epoch": epoch, "first_row": batch.first_row, "rows": batch.row_ids.tolist()}
            self._rows_file.write(json.dumps(record) + "\n")
            self._rows_file.flush()

    def save(self, state: TrainState, measured: dict[str, float]) -> None:
        """Write a checkpoint with the metrics measured on it; returns before it is committed. A collective.

        This rank only sends its random generators to rank 0.
        """
        self._sent()
        self._group.together(lambda: None)  # rank 0 may still be writing the checkpoint before
        self._sent = self._generators()

    def finish(self) -> str | None:
        """Wait for the write in progress. Returns the name of the last checkpoint that this process wrote, on rank 0."""
        self._sent()
        return None

    def _generators(self) -> Callable[[], Tensor]:
        """Begin to gather the random generators of all ranks; the result waits for them: uint8[ranks, n]. A collective."""
        return self._group.gather(capture_rng(self._group.device))
