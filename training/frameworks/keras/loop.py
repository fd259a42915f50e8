"""How does a compiled Keras model learn from penstock's rows, and when does it save? One `train_on_batch` a step.

`Model.fit` reads ahead in a thread of its own, so that after a kill no one could say which rows it had learned from.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray.train

from penstock.training.evaluation.metrics import validation_metrics
from penstock.training.evaluation.validation import measured
from penstock.training.frameworks.keras.library import backend, build, import_keras, inputs_of
from penstock.training.frameworks.keras.loading import KerasModel
from penstock.training.frameworks.keras.state import OPTIMIZER, WEIGHTS, WHOLE, read_variables, written_variables
from penstock.training.frameworks.ray_train.epochs import train_epochs
from penstock.training.frameworks.ray_train.save_plan import REPORT_EVERY, SavePlan
from penstock.training.frameworks.ray_train.session import Session
from penstock.training.job import TrainJob
from penstock.training.not_a_number import not_a_number
from penstock.training.open_feeds import open_job_feed
from penstock.training.own_values import OwnValues, collecting
from penstock.training.ranks import Group

__all__ = ["fit"]


def fit(job: TrainJob, group: Group, session: Session) -> None:
    """Train to the end of the spec, as the only rank.

    Raises:
        StopAtCheckpoint: the driver wants training to stop, and this state is saved.
    """
    keras = import_keras()
    _make_repeatable(keras, job)
    schema = job.manifest.feed_schema
    model = build(job.code, job.spec.params, schema)
    rows = train_epochs(job, group, session)
    run = _Run(job, group, session, model)
    newest = session.get_checkpoint()
    step = session.state.step
    run.see_a_batch()
    model.optimizer.build(model.trainable_variables)
    if newest is not None:
        for name, variables in ((WEIGHTS, model.variables), (OPTIMIZER, model.optimizer.variables)):
            read_variables(Path(newest.path, name).read_bytes(), variables, f"{name} of a checkpoint")
    last = min(len(rows) * job.spec.epochs, job.spec.max_steps or math.inf)
    while step < last:
        for batch in rows:
            step += 1
            run.step(batch, step)
            if step >= last or step % len(rows) == 0:
                break
            run.in_epoch(step)
        run.at_epochs_end(last=step >= last)


class _Run:
    """What one step is, and what comes between two."""

    def __init__(self, job: TrainJob, group: Group, session: Session, model: Any) -> None:
        self._job, self._session, self._model = job, session, model
        schema = job.manifest.feed_schema
        self._shown = KerasModel(model, schema, job.code.target)
        self._metrics = validation_metrics(job.spec.checkpoint.best, schema, self._shown)
        there = job.manifest.rows.get("validation")
        self._feed = open_job_feed(job, "validation", 0, 1, group.device) if there else None
        self._group, self._plan = group, SavePlan(job, group, session)
        self._values: dict[str, float] = {}

    def see_a_batch(self) -> None:
        """Only then the model has variables. Keras calls a loss of the user's once to learn its shape: that is no step."""
        first = next(iter(open_job_feed(self._job, "train", 0, 1, self._group.device).batches(0)))
        with collecting(OwnValues(None, "build")):
            self._model.test_on_batch(*self._given(first.columns))

    def step(self, batch: dict[str, Any], step: int) -> None:
        self._model.reset_metrics()  # else what it gives is a mean since the start
        found = self._model.train_on_batch(*self._given(batch), return_dict=True)
        self._values = {f"train/{name}": float(np.asarray(value)) for name, value in found.items()}
        if self._job.spec.on_nan == "stop" and not math.isfinite(self._values["train/loss"]):
            raise not_a_number(f"the training loss is {self._values['train/loss']} at step {step:,}")

    def _given(self, batch: dict[str, Any]) -> tuple[Any, Any]:
        """Inputs and label of a batch, as Keras takes them."""
        schema = self._job.manifest.feed_schema
        label = batch[schema.label].numpy() if schema.label is not None else None
        return inputs_of(self._model, batch, schema, self._job.code.target), label

    def in_epoch(self, step: int) -> None:
        validates = self._plan.validates(step)
        if validates:
            self._validate()
        if self._plan.due_in_epoch(step):
            self._save()
        elif validates or step % REPORT_EVERY == 0:
            self._session.report(self._values)

    def at_epochs_end(self, *, last: bool) -> None:
        self._validate()
        if self._plan.due_at_epochs_end(last=last):
            self._save()
        else:
            self._session.report(self._values)

    def _validate(self) -> None:
        if self._feed is not None:
            self._values |= measured(self._shown, self._feed, self._metrics, self._group)

    def _save(self) -> None:
        with tempfile.TemporaryDirectory(prefix="penstock-keras-") as folder:
            Path(folder, WEIGHTS).write_bytes(written_variables(self._model.variables))
            Path(folder, OPTIMIZER).write_bytes(written_variables(self._model.optimizer.variables))
            self._model.save(Path(folder, WHOLE))
            self._session.report(self._values, ray.train.Checkpoint.from_directory(folder))
        self._plan.saved()


def _make_repeatable(keras: Any, job: TrainJob) -> None:
    keras.utils.set_random_seed(job.seed)
    if backend() == "tensorflow":
        import tensorflow

        tensorflow.config.experimental.enable_op_determinism()
