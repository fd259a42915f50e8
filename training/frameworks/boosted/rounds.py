"""The loop of boosting: a round, metrics of both splits, a checkpoint where one is due.

Every rank grows the same rounds and has the same numbers; rank 0 charts and saves. Each validated round may be the best one,
but none is saved for that alone: the trees of an earlier round are the first of a later one's, so the best so far is
written with the next checkpoint that is due.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from penstock.config import Section
from penstock.digest import bytes_digest
from penstock.training.checkpoint.manifest import CheckpointFacts
from penstock.training.checkpoint.store import SavedBytes, Snapshot
from penstock.training.checkpoint.writer import CheckpointWriter
from penstock.training.evaluation.metrics import MetricSet
from penstock.training.events import Point, Saving, TrainProgress, now_ms
from penstock.training.faults import IN_THE_MODEL, not_a_number
from penstock.training.frameworks.boosted.library import PATIENCE, Trees
from penstock.training.frameworks.boosted.model import loss_of
from penstock.training.frameworks.boosted.table import ShardTable
from penstock.training.job import TrainJob
from penstock.training.loop.event_sender import EventSender
from penstock.training.ranks import Group
from penstock.training.spec import BestSpec, TrainSpec
from penstock.training.state import TrainState

__all__ = ["BEST_ROUND", "BestRound", "FirstRank", "Parts", "Round", "run_rounds"]

BEST_ROUND = "progress.json"
"""The file of a checkpoint with the `BestRound`."""


class BestRound(Section):
    """The best round so far."""

    value: float | None = None
    """Value of the metric of `train.checkpoint.best`."""
    step: int = 0
    """The latest round with that value."""
    reached: int = 0
    """The first round with that value: patience counts from here."""

    def after(self, step: int, value: float | None, rule: BestSpec) -> BestRound:
        """Return the best round after round `step` is measured."""
        if value is None or not math.isfinite(value):
            return self
        sign = 1.0 if rule.mode == "min" else -1.0
        if self.value is None or sign * value < sign * self.value:
            return BestRound(value=value, step=step, reached=step)
        return self.model_copy(update={"step": step}) if value == self.value else self


@dataclass(frozen=True)
class Parts:
    """The parts of the loop; `first` on rank 0 alone."""

    job: TrainJob
    group: Group
    trees: Trees
    train: ShardTable
    validation: ShardTable | None
    metrics: MetricSet
    first: FirstRank | None
    before: int = 0
    """Rounds of `train.start_from`; others are counted from there."""


def _rounds_of(spec: TrainSpec) -> int:
    """Return the number of rounds that the spec sets."""
    return min(spec.epochs, spec.max_steps) if spec.max_steps is not None else spec.epochs


def run_rounds(parts: Parts, state: TrainState, best_round: BestRound) -> tuple[Literal["finished", "interrupted"], TrainState]:
    """Boost from `state` to the end of the spec, or until the driver asks for a stop. A collective."""
    group, first, spec = parts.group, parts.first, parts.job.spec
    while not _over(spec, state, best_round):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        parts.trees.grow(parts.before + state.step)
        spent = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        logged: dict[str, float] = {}
        state = TrainState(step=state.step + 1, epoch=state.epoch + 1)
        sums = [*_loss_and_rows(parts, "train", parts.train), 0.0, 0.0]
        if parts.validation is not None:
            sums[2:] = _loss_and_rows(parts, "validation", parts.validation, parts.metrics)
        wishes = first.wishes() if first is not None else (False, False)
        everyones = [each if rank == group.rank else 0.0 for rank in range(group.world_size) for each in spent]
        train, rows, lost, others, stop, save, *of_ranks = group.sum([*sums, *map(float, wishes), *everyones])
        if group.world_size > 1:
            for rank, (step_s, cpu_s) in enumerate(zip(of_ranks[::2], of_ranks[1::2], strict=True)):
                logged |= {f"workers/{rank}/step_s": step_s, f"workers/{rank}/cpu_s": cpu_s}
        values = {"train/loss": train / rows}
        if not math.isfinite(train):
            raise not_a_number(f"the training loss is {train / rows} at round {state.step:,}", IN_THE_MODEL)
        if parts.validation is not None:
            values |= {"val/loss": lost / max(others, 1.0)}
            values |= {f"val/{name}": value for name, value in parts.metrics.compute().items()}
        if (best := spec.checkpoint.best) is not None:
            best_round = best_round.after(state.step, values.get(best.metric), best)
        last = _over(spec, state, best_round)
        if first is not None:
            rows_per_s = rows / max(time.perf_counter() - began_s, 1e-9)
            first.measured(Round(state, best_round, values), rows_per_s, logged)
            planned = spec.checkpoint.every_steps is not None and state.step % spec.checkpoint.every_steps == 0
            if last or stop or save or planned:
                first.save(parts.trees)
        if stop and not last:
            return "interrupted", state
    return "finished", state


def _over(spec: TrainSpec, state: TrainState, best_round: BestRound) -> bool:
    patience = spec.params.get(PATIENCE)
    out_of_patience = patience is not None and best_round.value is not None and state.step - best_round.reached >= int(patience)
    return out_of_patience or state.step >= _rounds_of(spec)


def _loss_and_rows(
    parts: Parts, split: Literal["train", "validation"], shard: ShardTable, metrics: MetricSet | None = None
) -> tuple[float, float]:
    """Sum the loss over this rank's rows of a split, updating `metrics`, and count them."""
    output, labels = torch.from_numpy(parts.trees.predictions(split)), torch.from_numpy(shard.labels)
    schema = parts.job.manifest.feed_schema
    if metrics is not None:
        metrics.update(output, {str(schema.label): labels})
    return float(loss_of(output, labels, schema)) * len(labels), float(len(labels))


class Round(NamedTuple):
    """The state after a round, the best one up to it, and its losses and metrics."""

    state: TrainState
    best: BestRound
    values: Mapping[str, float]


class FirstRank:
    """Rank 0's part: points for the tracker, and checkpoints.

    Args:
        sender: sends events to the driver.
        writer: writes checkpoints in the background.
        facts: the same in every checkpoint of this worker group.
        file: name of the trees in a checkpoint.
        before: as of `Parts`.
    """

    def __init__(
        self, job: TrainJob, sender: EventSender, writer: CheckpointWriter, facts: CheckpointFacts, file: str, before: int
    ) -> None:
        self._job, self._sender, self._writer, self._facts, self._file = job, sender, writer, facts, file
        self._before = before
        self._saved_s = time.monotonic()
        self._unsealed: list[Point] = []
        self._now: Round | None = None
        self._best: Round | None = None
        """Measured since the last checkpoint; None where that or an earlier one is still the best."""

    def wishes(self) -> tuple[bool, bool]:
        """Whether the driver asks for a stop, and whether `every_s` is over and the writer is free."""
        self._writer.check()
        every_s = self._job.spec.checkpoint.every_s
        due = every_s is not None and time.monotonic() - self._saved_s >= every_s
        return self._sender.stop_requested.is_set(), due and not self._writer.busy

    def measured(self, now: Round, rows_per_s: float, logged: Mapping[str, float]) -> None:
        """Chart a round, with `logged`: each rank's times."""
        self._now, step, epoch = now, now.state.step, now.state.epoch - 1
        if now.best.step == step:
            self._best = now
        point = Point(now_ms(), step, {**logged, **now.values, "train/rows_per_s": rows_per_s, "train/epoch": float(epoch)})
        self._unsealed.append(point)
        self._sender.post(point)
        self._sender.post(TrainProgress(step=step, total_steps=_rounds_of(self._job.spec), epoch=epoch, rows_per_s=rows_per_s))

    def finish(self) -> str | None:
        """Wait until all is written. Returns the name of the newest checkpoint written here."""
        return self._writer.wait()

    def save(self, trees: Trees) -> None:
        """Write the best round since the last checkpoint, and the newest one, in the background.

        Raises:
            CheckpointError: the one before could not be written.
        """
        best, self._best = self._best, None
        if best is not None and best is not self._now:
            self._write(best, trees)
        if self._now is not None:
            self._write(self._now, trees)
        self._saved_s = time.monotonic()

    def _write(self, measured: Round, trees: Trees) -> None:
        state, best, values = measured
        facts, content = self._facts.measured_at(state, values), trees.content(self._before + state.step)
        files = {self._file: SavedBytes(content), BEST_ROUND: SavedBytes(best.model_dump_json().encode())}
        points = [point for point in self._unsealed if point.step <= state.step]
        self._unsealed = self._unsealed[len(points) :]
        self._sender.post(Saving(step=state.step))
        self._writer.submit(lambda: Snapshot(facts, files, lambda: bytes_digest(content)), points)
