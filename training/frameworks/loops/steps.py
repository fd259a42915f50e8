"""Epochs of a known number of steps for a framework's trainer, and when it saves and validates.

`learn_batches` is the whole loop of a model that learns batch by batch, such as Keras' or a package's own.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray.train
import torch
from torch import Tensor

from penstock.errors import DataError, SpecError
from penstock.ingest.feed.batch import FeedShare, own_positions
from penstock.messages import counted
from penstock.storage import Storage
from penstock.training.evaluation.metrics import validation_metrics
from penstock.training.evaluation.validation import measured
from penstock.training.faults import IN_THE_MODEL, not_a_number
from penstock.training.frameworks.registry import FRAMEWORKS
from penstock.training.job import TrainJob
from penstock.training.model import ModelSpec, TrainedModel, load_model
from penstock.training.open_feeds import open_job_feed
from penstock.training.ranks import Group
from penstock.training.session.session import Session
from penstock.training.session.shard import Shard

__all__ = [
    "REPORT_EVERY",
    "Epochs",
    "SavePlan",
    "as_rank",
    "fit_loaded",
    "learn_batches",
    "train_epochs",
    "validation",
    "validation_epochs",
]

REPORT_EVERY = 10
"""Steps between points of the training metrics."""


class Epochs:
    """A data loader: each `iter()` is an epoch of batches, the first one from the start of training.

    Args:
        rows: of a step, on this rank.
        steps: of a whole epoch.
        device: of the batches; None is this rank's.
    """

    def __init__(self, shard: Shard, rows: int, steps: int, device: torch.device | None = None) -> None:
        self._shard, self._rows, self._steps, self._device = shard, rows, steps, device

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self._shard.iter_torch_batches(batch_size=self._rows, device=self._device))

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: the session keeps the place. Lightning needs it to continue in mid epoch."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""


def train_epochs(job: TrainJob, group: Group, session: Session, device: torch.device | None = None) -> Epochs:
    """Open the train split.

    Raises:
        SpecError: an epoch's last step has too few rows for all workers, or its steps cannot be counted.
    """
    steps = replace(job, spec=job.spec.model_copy(update={"epochs": 1, "max_steps": None})).total_steps
    if steps is None:
        raise SpecError(
            f"shuffle.by_length does not fit {job.spec.framework}, which needs the number of steps in advance",
            next_step="take it out",
        )
    rest, workers, lanes = job.order.epoch_rows % job.spec.batch_rows, group.world_size, job.order.lanes
    shares = (FeedShare(job.spec.batch_rows, rank, workers, lanes=lanes) for rank in range(workers))
    if rest and not all(len(own_positions(part, [(0, rest)])[0]) for part in shares):
        raise SpecError(
            f"the last step of an epoch has {counted(rest, 'row')}, which do not reach all {workers} workers",
            next_step="take another train.batch_rows" + (f", or set shuffle.lanes to less than {lanes}" if lanes > 1 else ""),
        )
    return Epochs(session.shard("train"), job.spec.batch_rows // group.world_size, steps, device)


def validation_epochs(job: TrainJob, group: Group, session: Session) -> Epochs | None:
    """Open the validation split, if it has rows."""
    rows = job.manifest.rows.get("validation")
    if not rows:
        return None
    whole, rest = divmod(rows, job.spec.batch_rows)
    return Epochs(session.shard("validation"), job.spec.batch_rows // group.world_size, whole + (rest >= group.world_size))


class SavePlan:
    """When a rank saves and validates, by `train.checkpoint` and `train.validate_every_steps`.

    `due_*` are collectives: the first rank's clock decides for all.
    """

    def __init__(self, job: TrainJob, group: Group, session: Session) -> None:
        self._spec, self._group, self._session = job.spec, group, session
        self._saved_s = time.monotonic()

    def validates(self, step: int) -> bool:
        """Whether to validate in the middle of an epoch."""
        return _is_every(self._spec.validate_every_steps, step)

    def due_in_epoch(self, step: int) -> bool:
        """Whether to save after a step that does not end an epoch."""
        candidate = self._spec.checkpoint.best is not None and self.validates(step)
        return bool(self._group.from_first(candidate or self._due(step)))

    def due_at_epochs_end(self, step: int, *, last: bool) -> bool:
        """Whether to save after the step that ends an epoch, the `last` one of training or not."""
        checkpoint = self._spec.checkpoint
        wanted = checkpoint.every_epoch or checkpoint.best is not None or last
        return bool(self._group.from_first(wanted or self._due(step)))

    def _due(self, step: int) -> bool:
        every_s, planned = self._spec.checkpoint.every_s, _is_every(self._spec.checkpoint.every_steps, step)
        over = every_s is not None and time.monotonic() - self._saved_s >= every_s
        return planned or over or self._session.stop_wanted

    def saved(self) -> None:
        """Restart `every_s` after a save."""
        self._saved_s = time.monotonic()


def validation(job: TrainJob, group: Group, model: TrainedModel) -> Callable[[], dict[str, float]]:
    """Make the function that measures `val/loss` and penstock's metrics, each rank its share: a collective; empty without rows.

    Raises:
        SpecError: `train.checkpoint.best` names a metric that cannot be measured.
    """
    metrics = validation_metrics(job.spec.checkpoint.best, job.manifest.feed_schema, model).to(model.device)
    if not job.manifest.rows.get("validation"):
        return dict
    feed = open_job_feed(job, "validation", group.rank, group.world_size, model.device)
    return partial(measured, model, feed, metrics, group)


def fit_loaded(job: TrainJob, group: Group, session: Session) -> None:
    """Train the model that the framework's loader makes, as the only rank. See `own_loop.LearnsBatches`."""
    newest = session.get_checkpoint()
    loader, schema = FRAMEWORKS.get(job.spec.framework).loader, job.manifest.feed_schema
    spec = ModelSpec(code=job.code, params=job.spec.params, feed_schema=schema, loader=loader)
    model: Any = load_model(spec, Storage(str(newest.path)) if newest is not None else None)
    learn_batches(job, group, session, model, model.learn, model.write)


def learn_batches(
    job: TrainJob,
    group: Group,
    session: Session,
    model: TrainedModel,
    learn: Callable[[dict[str, Tensor]], Mapping[str, float]],
    write: Callable[[Path], None],
) -> None:
    """Train a model to the end of the spec, as the only rank.

    Args:
        learn: learns one batch and returns the values to chart, `train/loss` among them.
        write: writes the whole state into a folder.

    Raises:
        SpecError: there is more than one worker.
        DataError: the feed gives no batch.
        TrainingError: a loss is not a number.
        StopAtCheckpoint: the driver has asked for a stop, and this state is saved.
    """
    if group.world_size > 1:
        raise SpecError(
            f"train.workers: {group.world_size} with train.framework: {job.spec.framework}, which trains in one process",
            next_step="set train.workers: 1",
        )
    rows = train_epochs(job, group, session, model.device)
    plan, validate = SavePlan(job, group, session), validation(job, group, model)
    values: dict[str, float] = {}

    def report(*, save: bool) -> None:
        if not save:
            session.report(values)
            return
        with tempfile.TemporaryDirectory(prefix="penstock-save-") as folder:
            write(Path(folder))
            session.report(values, ray.train.Checkpoint.from_directory(folder))
        plan.saved()

    step = session.state.step
    last = min(len(rows) * job.spec.epochs, job.spec.max_steps or math.inf)
    while step < last:
        before = step
        for batch in rows:
            step += 1
            values = dict(learn(batch))
            if not math.isfinite(values["train/loss"]):
                raise not_a_number(f"the training loss is {values['train/loss']} at step {step:,}", IN_THE_MODEL)
            if step >= last or step % len(rows) == 0:
                break
            if validates := plan.validates(step):
                values |= validate()
            if plan.due_in_epoch(step):
                report(save=True)
            elif validates or step % REPORT_EVERY == 0:
                report(save=False)
        if step == before:  # else an endless loop
            raise DataError(f"the train feed gave no batch at step {step:,}")
        values |= validate()
        report(save=plan.due_at_epochs_end(step, last=step >= last))


@contextmanager
def as_rank(group: Group, **others: str) -> Iterator[None]:
    """Set the environment variables that launchers set, and `others`: this rank of the group, or the only one."""
    ours = {
        "RANK": str(group.rank),
        "WORLD_SIZE": str(group.world_size),
        "LOCAL_RANK": str(group.device.index or 0) if group.device.type == "cuda" else str(group.rank),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # else it takes all cores of the machine
    }
    ours |= {"LOCAL_WORLD_SIZE": str(group.world_size), **others}
    names = [*ours]
    before = {name: os.environ[name] for name in names if name in os.environ}
    for name in names:
        os.environ.pop(name, None)
    if group.world_size > 1:
        os.environ.update(ours)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


def _is_every(steps: int | None, step: int) -> bool:
    return steps is not None and step % steps == 0
