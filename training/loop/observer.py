"""How are steps reported, checkpoints written and a stop obeyed? The loop calls an observer on each rank; rank 0's does it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.training.checkpoint.exactness import with_reason
from penstock.training.checkpoint.manifest import CheckpointFacts
from penstock.training.checkpoint.state_files import torch_snapshot, training_file
from penstock.training.checkpoint.store import Snapshot
from penstock.training.checkpoint.writer import CheckpointWriter
from penstock.training.events import Notice, Point, Saving, TrainProgress, Warned, now_ms
from penstock.training.job import TrainJob
from penstock.training.loop.event_sender import EventSender
from penstock.training.loop.step_sync import Decision
from penstock.training.ranks import Group
from penstock.training.rng import capture_rng
from penstock.training.state import TrainState
from penstock.training.step.learner import Learner
from penstock.training.step.unsaved import Unsaved

__all__ = ["FirstRank", "Observer", "StepTimes"]


@dataclass(frozen=True)
class StepTimes:
    """When a step was launched, its wait for rows in seconds, and the rows that it processed."""

    t_ms: int
    data_wait_s: float
    global_rows: int
    learning_rate: float
    epoch: int


class Observer:
    """The observer of a rank that writes no checkpoint: it takes part in a save.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sent: Callable[[], object] = lambda: None

    def wants(self) -> tuple[bool, bool]:
        """Return whether to (stop, save); called on rank 0 at each exchange."""
        return False, False

    def steps(self, last_step: int, times: list[StepTimes], met: Decision, seconds: float) -> None:
        """Report steps, the last of which is `last_step`, that took `seconds` until their losses were there."""

    def validated(self, step: int, metrics: dict[str, float]) -> None:
        """Report a validation."""

    def notify(self, message: str) -> None:
        """Report a line of text."""

    @property
    def exactness(self) -> str | None:
        """The `exactness` that the next checkpoint will record; known on rank 0."""
        return None

    def nondeterministic_op(self, operation: str) -> None:
        """Note that a nondeterministic operation was used."""

    def add_caveat(self, reason: str) -> None:
        """Note why a run that continues from the next checkpoint may differ from an undisturbed one."""

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


class FirstRank(Observer):
    """Rank 0's observer.

    Args:
        job: the training.
        group: the ranks.
        sender: takes events to the driver.
        writer: writes checkpoints in the background.
        learner: its state is saved.
        facts: the part that is the same in every checkpoint of this worker group.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        job: TrainJob,
        group: Group,
        sender: EventSender,
        writer: CheckpointWriter,
        learner: Learner,
        facts: CheckpointFacts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(group)
        self._job, self._sender, self._writer, self._learner, self._facts = job, sender, writer, learner, facts
        self._clock = clock
        self._saved_s = clock()
        self._unsealed: list[Point] = []
        self._outside = Unsaved(learner.unsaved_state)

    @property
    def exactness(self) -> str:
        """The `exactness` that the next checkpoint will record."""
        return self._facts.exactness

    def nondeterministic_op(self, operation: str) -> None:
        """Record it in checkpoints from now on, and warn the driver once."""
        exactness = with_reason(self._facts.exactness, f"{operation} is not deterministic")
        if exactness != self._facts.exactness:
            self._facts = self._facts.model_copy(update={"exactness": exactness})
            self._sender.post(
                Warned(message=f"torch has no deterministic {operation} for this device: weights may differ in their last bits")
            )

    def add_caveat(self, reason: str) -> None:
        """Record it in checkpoints from now on."""
        if reason not in self._facts.caveats:
            self._facts = self._facts.model_copy(update={"caveats": [*self._facts.caveats, reason]})

    def _note_unsaved_state(self) -> None:
        if new := [name for name in self._outside.changed() if f"{name} is in no checkpoint" not in self._facts.caveats]:
            self._sender.post(
                Warned(
                    message=f"no checkpoint holds {', '.join(new)}, which changes while training: a run that continues begins "
                    "it anew, and is not bit-exact; keep it in a buffer of the model (register_buffer)"
                )
            )
        for name in new:
            self.add_caveat(f"{name} is in no checkpoint")

    def wants(self) -> tuple[bool, bool]:
        """Want a stop when the driver requested one, and a save when `every_s` has passed and the writer is free."""
        self._writer.check()
        every_s = self._job.spec.checkpoint.every_s
        due = every_s is not None and self._clock() - self._saved_s >= every_s
        return self._sender.stop_requested.is_set(), due and not self._writer.busy

    def steps(self, last_step: int, times: list[StepTimes], met: Decision, seconds: float) -> None:
        """Turn steps into points and progress. A GPU works behind the launches, so all these steps have one rate."""
        self._outside.after_step()
        first, seconds = last_step - len(times) + 1, max(seconds, 1e-9)
        rows_per_s = sum(time_.global_rows for time_ in times) / seconds
        for step, (time_, loss, own) in enumerate(zip(times, met.losses, met.own, strict=True), start=first):
            values = {
                **own,
                "train/loss": loss,
                "train/lr": time_.learning_rate,
                "train/rows_per_s": rows_per_s,
                "train/step_s": seconds / len(times),
                "train/data_wait_s": time_.data_wait_s,
                "train/epoch": float(time_.epoch),
            }
            if step == last_step and len(met.waits_s) > 1:
                values |= {f"workers/{rank}/data_wait_s": wait_s for rank, wait_s in enumerate(met.waits_s)}
            self._add(Point(time_.t_ms, step, values))
        total = self._job.total_steps
        self._sender.post(TrainProgress(step=last_step, total_steps=total, epoch=times[-1].epoch, rows_per_s=rows_per_s))

    def validated(self, step: int, metrics: dict[str, float]) -> None:
        """Turn a validation into a point."""
        self._add(Point(now_ms(), step, metrics))

    def notify(self, message: str) -> None:
        """Send the driver a notice."""
        self._sender.post(Notice(message=message))

    def save(self, state: TrainState, measured: dict[str, float]) -> None:
        """Copy the state to memory and write it in the background. A collective.

        Raises:
            CheckpointError, RuntimeError, TrainingError: from the write before, as `CheckpointWriter.submit`.
        """
        self._group.together(self._writer.wait)  # before the copy: at most one is held
        self._note_unsaved_state()
        generators = self._generators()
        weights, training = self._learner.copy_weights(), self._learner.copy_training()
        facts = self._facts.measured_at(state, measured)
        points, self._unsealed = self._unsealed, []
        self._sender.post(Saving(step=state.step))

        def completed() -> Snapshot:
            state_file = training_file(training(), generators())
            return torch_snapshot(facts, weights(), state_file)

        self._writer.submit(completed, points)
        self._saved_s = self._clock()

    def finish(self) -> str | None:
        """Wait for the last checkpoint to be committed.

        Raises:
            CheckpointError, RuntimeError, TrainingError: from the last write, as `CheckpointWriter.submit`.
        """
        return self._writer.wait()

    def _add(self, point: Point) -> None:
        self._unsealed.append(point)
        self._sender.post(point)
        self._learner.callbacks.call("logged", point.step, dict(point.values))
