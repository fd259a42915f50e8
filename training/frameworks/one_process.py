"""How does a framework train that needs one process only: in the driver, batch by batch?

The same promises as torch's loop: it continues behind the last committed batch, saves when `train.checkpoint` says so, seals
the metric points before the checkpoint they belong to, validates at the end of an epoch, and saves before it stops.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing

from penstock.digest import bytes_digest, digest_of
from penstock.errors import DataError
from penstock.ingest.feed.batch import Batch
from penstock.training.checkpoint.exactness import BIT_EXACT, environment_of, environment_of_all, judge
from penstock.training.checkpoint.fence import Writer
from penstock.training.checkpoint.journal import JournalWriter, truncate_journal
from penstock.training.checkpoint.manifest import Checkpoint, CheckpointFacts
from penstock.training.checkpoint.outcome import job_checkpoints, outcome_of
from penstock.training.checkpoint.store import CheckpointStore, SavedBytes, Snapshot
from penstock.training.checkpoint.writer import CheckpointWriter
from penstock.training.evaluation.metrics import validation_metrics
from penstock.training.evaluation.validation import run_over
from penstock.training.events import Event, Point, Resumed, Saving, TrainProgress, now_ms
from penstock.training.job import TrainJob, TrainOutcome
from penstock.training.loop.machine_load import MachineSampler
from penstock.training.model import LearningModel
from penstock.training.not_a_number import not_a_number
from penstock.training.open_feeds import open_job_feed
from penstock.training.state import TrainState

__all__ = ["train_in_process"]


def train_in_process(
    job: TrainJob,
    start: Callable[[Checkpoint | None], LearningModel],
    *,
    stop: threading.Event,
    listener: Callable[[list[Event]], None],
) -> TrainOutcome:
    """Train to the end of the spec, or until `stop` is set.

    Args:
        start: makes the model, from the checkpoint to continue from if there is one.
        stop, listener: as of `Framework.train`.

    Raises:
        TrainingError: a loss is not a number, and `train.on_nan` is `stop`.
        CheckpointError: a checkpoint cannot be written, or none can be trusted.
        DataError: the feed gives no rows.
    """
    store = job_checkpoints(job)
    store.take_over(Writer(job.attempt))
    checkpoint, warnings = store.newest_valid()
    store.clean(checkpoint)
    model = start(checkpoint)
    run = _Run(job, model, checkpoint, store, listener)
    if checkpoint is not None:
        exactness = run.facts.exactness
        step, found = checkpoint.manifest.step, tuple(warnings)
        listener([Resumed(step=step, checkpoint=checkpoint.name, exactness=exactness, warnings=found)])
    feed = open_job_feed(job, "train", 0, 1, model.device)
    with closing(run.writer):
        while not run.finished and not stop.is_set():
            before = run.state
            for batch in feed.batches(before.epoch, before.position):
                run.step(batch, epoch_done=batch.position >= feed.num_rows)
                if run.finished or stop.is_set() or run.state.epoch > before.epoch:
                    break
            if run.state == before:  # asking again would give nothing again, for ever
                raise DataError(f"the train feed gave no batch at row {before.position:,} of epoch {before.epoch}")
            if stop.is_set() and not run.finished:
                run.save()
        run.writer.wait()
    listener(run.take())
    return outcome_of(
        job,
        "finished" if run.finished else "interrupted",
        exactness=run.facts.exactness,
        resumed_from_step=checkpoint.manifest.step if checkpoint is not None else None,
        warnings=warnings,
    )


class _Run:
    """One attempt: where it stands, what is not told yet, and when it was saved last."""

    def __init__(
        self,
        job: TrainJob,
        model: LearningModel,
        checkpoint: Checkpoint | None,
        store: CheckpointStore,
        listener: Callable[[list[Event]], None],
    ) -> None:
        self._job, self._model, self._listener = job, model, listener
        self.state = checkpoint.state if checkpoint is not None else TrainState()
        environment = environment_of_all([environment_of(model.device, job.manifest.feed_schema)])
        self.facts = CheckpointFacts(
            step=self.state.step,
            epoch=self.state.epoch,
            position=self.state.position,
            world_size=1,
            identity=job.identity,
            settings=job.settings,
            environment=environment,
            exactness=judge(checkpoint.manifest, 1, job.settings, environment) if checkpoint is not None else BIT_EXACT,
        )
        truncate_journal(job.run_storage, self.state.step)
        self._sampler = MachineSampler()
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._unsealed: list[Point] = []
        self._measured: dict[str, float] = {}
        self._metrics = validation_metrics(job.spec.checkpoint.best, job.manifest.feed_schema, model).to(model.device)
        self.writer = CheckpointWriter(store, JournalWriter(job.run_storage, store.writer), self._post)
        self._saved_s = self._told_s = time.monotonic()

    @property
    def finished(self) -> bool:
        """Whether the spec asks for no further step."""
        spec = self._job.spec
        return self.state.epoch >= spec.epochs or (spec.max_steps is not None and self.state.step >= spec.max_steps)

    def step(self, batch: Batch, *, epoch_done: bool) -> None:
        """Learn a batch; validate, save and tell where that is due."""
        spec, began_s = self._job.spec, time.monotonic()
        loss = self._model.learn(batch.columns)
        epoch, self.state = self.state.epoch, self.state.after_batch(batch.position)
        if not math.isfinite(loss) and spec.on_nan == "stop":
            raise not_a_number(f"the training loss is {loss} at step {self.state.step:,}")
        rows_per_s = batch.rows / max(time.monotonic() - began_s, 1e-9)
        self._measured = {"train/loss": loss}
        self._point({"train/loss": loss, "train/rows_per_s": rows_per_s, "train/epoch": float(epoch)})
        if epoch_done:
            self.state = self.state.next_epoch()
        validated = epoch_done or self.finished or _every(spec.validate_every_steps, self.state.step)
        if validated and self._job.manifest.rows.get("validation"):
            self._validate()
        candidate = validated and spec.checkpoint.best is not None
        planned = _every(spec.checkpoint.every_steps, self.state.step) or (epoch_done and spec.checkpoint.every_epoch)
        due = spec.checkpoint.every_s is not None and time.monotonic() - self._saved_s >= spec.checkpoint.every_s
        if self.finished or candidate or planned or (due and not self.writer.busy):
            self.save()
        self.writer.check()
        if time.monotonic() - self._told_s > 0.3 or self.finished:
            total = self._job.total_steps
            self._post(TrainProgress(step=self.state.step, total_steps=total, epoch=epoch, rows_per_s=rows_per_s))
            self._told_s = time.monotonic()
            self._listener([*self.take(), *self._sampler.take()])

    def save(self) -> None:
        """Copy the model and have it written in the background."""
        facts = self.facts.model_copy(
            update={
                "step": self.state.step,
                "epoch": self.state.epoch,
                "position": self.state.position,
                "metrics": {name: value if math.isfinite(value) else None for name, value in self._measured.items()},
            }
        )
        files = dict(self._model.files())
        saved = {name: SavedBytes(content) for name, content in files.items()}
        digest = digest_of({name: bytes_digest(content) for name, content in files.items()})
        points, self._unsealed = self._unsealed, []
        self._post(Saving(step=self.state.step))
        self.writer.submit(lambda: Snapshot(facts, saved, lambda: digest), points)
        self._saved_s = time.monotonic()

    def take(self) -> list[Event]:
        """The events since the last call; the writer's thread makes some."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def _validate(self) -> None:
        loss, rows = run_over(
            self._model, open_job_feed(self._job, "validation", 0, 1, self._model.device).batches(0), self._metrics
        )
        values = {"loss": loss / max(rows, 1), **self._metrics.compute()}
        validated = {f"val/{name}": value for name, value in values.items()}
        self._measured |= validated
        self._point(validated)

    def _point(self, values: Mapping[str, float]) -> None:
        point = Point(now_ms(), self.state.step, values)
        self._unsealed.append(point)
        self._post(point)

    def _post(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)


def _every(steps: int | None, step: int) -> bool:
    return steps is not None and step % steps == 0
