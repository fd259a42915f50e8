"""What does rank 0 tell the outside while the loop runs (points, progress), and what does it wish for (a save, a stop)?"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import IO

from ingest.feed import Batch
from training.checkpoint_writer import CheckpointWriter
from training.journal import Point
from training.loop import Observer, StepTimes
from training.mailbox import Courier, Progress, Warned, now_ms

__all__ = ["Reporter", "RowRecorder"]


class RowRecorder(Observer):
    """Writes the row ids of every step this rank learns, one JSON line per step."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def batch(self, step: int, epoch: int, batch: Batch) -> None:
        """Record the rows before they are learned: a line more than learned is harmless, a line less would hide a row."""
        record = {"step": step, "epoch": epoch, "first_row": batch.first_row, "rows": batch.row_ids.tolist()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


class Reporter(RowRecorder):
    """Rank 0's observer.

    Args:
        courier: takes events to the driver.
        writer: asked whether it is busy, before a checkpoint is wished for.
        every_s: seconds between time-based checkpoints; None for none.
        total_steps: of the whole training, for progress.
        rows_file: where row ids go, if they are recorded.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        courier: Courier,
        writer: CheckpointWriter,
        *,
        every_s: float | None,
        total_steps: int,
        rows_file: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._courier = courier
        self._writer = writer
        self._every_s = every_s
        self._total_steps = total_steps
        self._rows_file = rows_file
        self._clock = clock
        self._saved_s = clock()
        self._unsealed: list[Point] = []
        self._warned_not_finite = False

    def wants(self) -> tuple[bool, bool]:
        """A stop when the driver asked for one, a save when the time has come and the writer is free."""
        self._writer.check()
        elapsed_s = self._clock() - self._saved_s
        save = self._every_s is not None and elapsed_s >= self._every_s and not self._writer.busy
        return self._courier.stop_requested.is_set(), save

    def batch(self, step: int, epoch: int, batch: Batch) -> None:
        """Record row ids if the job says so."""
        if self._rows_file is not None:
            RowRecorder(self._rows_file).batch(step, epoch, batch)

    def steps(self, last_step: int, times: list[StepTimes], losses: list[float]) -> None:
        """Turn steps into points and progress."""
        first = last_step - len(times) + 1
        for step, (time_, loss) in enumerate(zip(times, losses, strict=True), start=first):
            values = {
                "train/loss": loss,
                "train/lr": time_.learning_rate,
                "train/rows_per_s": time_.global_rows / max(time_.step_s, 1e-9),
                "train/step_s": time_.step_s,
                "train/data_wait_s": time_.data_wait_s,
                "train/epoch": float(time_.epoch),
            }
            self._add(Point(time_.t_ms, step, values))
            if not math.isfinite(loss) and not self._warned_not_finite:
                self._warned_not_finite = True
                self._courier.post(Warned(message=f"the training loss is {loss} at step {step:,}"))
        seconds = sum(time_.step_s for time_ in times)
        rows_per_s = sum(time_.global_rows for time_ in times) / max(seconds, 1e-9)
        progress = Progress(step=last_step, total_steps=self._total_steps, epoch=times[-1].epoch, rows_per_s=rows_per_s)
        self._courier.post(progress)

    def validated(self, step: int, metrics: dict[str, float]) -> None:
        """Turn a validation into a point."""
        self._add(Point(now_ms(), step, metrics))

    def take_unsealed(self) -> list[Point]:
        """The points since the last checkpoint, for the journal; a checkpoint is being taken now."""
        self._saved_s = self._clock()
        points, self._unsealed = self._unsealed, []
        return points

    def _add(self, point: Point) -> None:
        self._unsealed.append(point)
        self._courier.post(point)
