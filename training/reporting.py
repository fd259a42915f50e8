"""What does a rank do besides learning? It takes part in a save; rank 0 charts, writes checkpoints and obeys a stop."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import IO

from ingest.cursor import Batch
from training.checkpoint import Checkpoint, CheckpointFacts, CheckpointStore, Snapshot
from training.checkpoint_writer import CheckpointWriter
from training.group import Group
from training.job import TrainJob
from training.journal import JournalWriter, Point, truncate_journal
from training.learner import Learner
from training.loop import Observer, StepTimes
from training.mailbox import Courier, MailboxClient, Progress, Resumed, Saving, Warned, now_ms
from training.not_a_number import not_a_number
from training.packed import pack
from training.state import TrainState, capture_rng

__all__ = ["FirstRank", "RankObserver", "rank_observer"]


class RankObserver(Observer):
    """The observer of every rank but the first.

    Args:
        group: the ranks.
        rows_file: where row ids go, one JSON line per step, if they are recorded.
    """

    def __init__(self, group: Group, rows_file: IO[str] | None) -> None:
        self._group = group
        self._rows_file = rows_file
        self._sent: Callable[[], object] = lambda: None

    def resumed(self, checkpoint: Checkpoint, warnings: list[str]) -> None:
        """Training continues from `checkpoint`."""

    def batch(self, step: int, epoch: int, batch: Batch) -> None:
        """Record the rows before they are learned: a line more than learned is harmless, a line less would hide a row."""
        if self._rows_file is not None:
            record = {"step": step, "epoch": epoch, "first_row": batch.first_row, "rows": batch.row_ids.tolist()}
            self._rows_file.write(json.dumps(record) + "\n")
            self._rows_file.flush()

    def save(self, state: TrainState, measured: dict[str, float]) -> None:
        """Give this rank's random generators to rank 0. A collective."""
        self._sent()
        self._sent = self._group.gather(pack(capture_rng(self._group.device))["bytes"])

    def finish(self) -> str | None:
        """Wait for what is being written; the name of the last checkpoint written by this process, on rank 0."""
        self._sent()
        return None


class FirstRank(RankObserver):
    """Rank 0's observer.

    Args:
        job: what is trained.
        group: the ranks.
        courier: takes events to the driver.
        writer: writes checkpoints in the background.
        learner: what is saved.
        facts: what is the same in every checkpoint of this worker group.
        rows_file: as for every rank.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        job: TrainJob,
        group: Group,
        courier: Courier,
        writer: CheckpointWriter,
        learner: Learner,
        facts: CheckpointFacts,
        rows_file: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(group, rows_file)
        self._job, self._courier, self._writer, self._learner, self._facts = job, courier, writer, learner, facts
        self._clock = clock
        self._saved_s = clock()
        self._unsealed: list[Point] = []
        self._warned_not_finite = False

    def resumed(self, checkpoint: Checkpoint, warnings: list[str]) -> None:
        """Tell the driver."""
        step, name = checkpoint.manifest.step, checkpoint.name
        self._courier.post(Resumed(step=step, checkpoint=name, exactness=self._facts.exactness, warnings=tuple(warnings)))

    def wants(self) -> tuple[bool, bool]:
        """A stop when the driver asked for one, a save when the time has come and the writer is free."""
        self._writer.check()
        every_s = self._job.spec.checkpoint.every_s
        due = every_s is not None and self._clock() - self._saved_s >= every_s
        return self._courier.stop_requested.is_set(), due and not self._writer.busy

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
            warns = self._job.spec.on_nan == "warn"
            if warns and not math.isfinite(loss) and not self._warned_not_finite:
                self._warned_not_finite = True
                self._courier.post(Warned(message=f"the training loss is {loss} at step {step:,}"))
        seconds = sum(time_.step_s for time_ in times)
        rows_per_s = sum(time_.global_rows for time_ in times) / max(seconds, 1e-9)
        total = self._job.total_steps
        self._courier.post(Progress(step=last_step, total_steps=total, epoch=times[-1].epoch, rows_per_s=rows_per_s))

    def validated(self, step: int, metrics: dict[str, float]) -> None:
        """Turn a validation into a point."""
        self._add(Point(now_ms(), step, metrics))

    def save(self, state: TrainState, measured: dict[str, float]) -> None:
        """Copy everything to memory and have it written in the background. A collective.

        Raises:
            CheckpointError: the write before failed.
            RuntimeError: a rank was lost before it had sent its part of the one before.
            TrainingError: a weight is not a number.
        """
        self._writer.wait()  # before the copy: at most one is held
        generators = pack(capture_rng(self._group.device))
        everyones = self._group.gather(generators["bytes"])
        weights, training = self._learner.snapshot()
        update = {
            "step": state.step,
            "epoch": state.epoch,
            "position": state.position,
            "metrics": {name: value if math.isfinite(value) else None for name, value in measured.items()},
        }
        points, self._unsealed = self._unsealed, []
        self._courier.post(Saving(step=state.step))
        if self._job.spec.on_nan == "stop":
            bad = next((name for name, tensor in weights.items() if tensor.is_floating_point() and tensor.isnan().any()), None)
            if bad is not None:
                raise not_a_number(f"the weight {bad} is not a number after step {state.step:,}")
        facts = self._facts.model_copy(update=update)
        self._writer.submit(lambda: Snapshot(facts, weights, training, {**generators, "bytes": everyones()}), points)
        self._saved_s = self._clock()

    def finish(self) -> str | None:
        """Wait for the last checkpoint to be committed.

        Raises:
            CheckpointError, RuntimeError: it could not be written, or not be completed.
        """
        last = self._writer.wait()
        return last.name if last is not None else None

    def _add(self, point: Point) -> None:
        self._unsealed.append(point)
        self._courier.post(point)


@contextmanager
def rank_observer(
    job: TrainJob, group: Group, client: MailboxClient, store: CheckpointStore, learner: Learner, facts: CheckpointFacts
) -> Iterator[RankObserver]:
    """The observer of this rank. Leaving the context ends its threads and delivers its last events, also after an error."""
    with _rows_file(job, group.rank) as rows_file:
        if not group.is_first:
            yield RankObserver(group, rows_file)
            return
        # What was sealed beyond the checkpoint belongs to steps that are now executed again.
        truncate_journal(job.run_storage, facts.step)
        courier = Courier(client)
        writer = CheckpointWriter(store, JournalWriter(job.run_storage, job.attempt), courier.post)
        try:
            yield FirstRank(job, group, courier, writer, learner, facts, rows_file)
        finally:
            writer.close()
            courier.close()


def _rows_file(job: TrainJob, rank: int) -> AbstractContextManager[IO[str] | None]:
    if not job.record_rows:
        return nullcontext(None)
    path = job.run_storage.local_path(f"rows/{job.attempt}-{rank}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "a", encoding="utf-8")
