"""What does a framework add whose model learns in the driver, batch by batch? The model; the rest is the same for all of them.

The module imports no Ray, so that a package's module that names `InProcess` can load a registered model, too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import FeedSchema
from penstock.training.checkpoint.manifest import Checkpoint
from penstock.training.events import Event
from penstock.training.frameworks.framework import TriedBatch
from penstock.training.frameworks.own_trainer import blaming_the_build
from penstock.training.job import TrainJob, TrainOutcome
from penstock.training.model import LearningModel, Predicts
from penstock.training.not_a_number import not_a_number
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

__all__ = ["InProcess"]


class _NotStarted(Predicts):
    """What can be measured of a model that will be there when the schema is known: the defaults."""


@dataclass(frozen=True)
class InProcess:
    """A `penstock.training.frameworks.framework.Framework` of a model that learns in one process.

    Attributes:
        model: called with (code, params, schema, files), where `files` is the storage of a checkpoint's, or None to begin.
        libraries, loader, model_files: as of `Framework`.
    """

    model: Callable[..., LearningModel]
    libraries: tuple[str, ...]
    loader: str
    model_files: tuple[str, ...]

    def check(self, code: UserCode, spec: TrainSpec) -> Predicts:
        """Import what `train.recipe` names."""
        code.load()
        return _NotStarted()

    def try_batch(self, code: UserCode, spec: TrainSpec, schema: FeedSchema, batch: Batch, seed: int) -> TriedBatch:
        """Learn from the rows, and predict them.

        Raises:
            SpecError: the model cannot be made, as with params that it does not take.
        """
        model: LearningModel = blaming_the_build(code, lambda: self.model(code, spec.params, schema, None))
        columns = dict(batch.columns)
        loss = model.learn(columns)
        if not math.isfinite(loss):
            raise not_a_number(f"{code.target}: the loss of the first batch is {loss}")
        size = sum(map(len, model.files().values()))
        shape = list(model.predict(columns, batch.rows).shape) if model.can_predict else None
        return TriedBatch(
            loss=loss, parameters=model.num_parameters, weights_bytes=size, checkpoint_bytes=size, predict_shape=shape
        )

    def train(
        self,
        job: TrainJob,
        *,
        stop: threading.Event,
        listener: Callable[[list[Event]], None],
        own_cluster: bool = False,
    ) -> TrainOutcome:
        """Train in this process."""
        from penstock.training.frameworks.one_process import train_in_process  # it brings Ray

        def start(checkpoint: Checkpoint | None) -> LearningModel:
            files = checkpoint.storage if checkpoint is not None else None
            return self.model(job.code, job.spec.params, job.manifest.feed_schema, files)

        return train_in_process(job, start, stop=stop, listener=listener)
