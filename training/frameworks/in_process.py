"""What does a framework add whose model learns in one process, batch by batch? The model; the rest is the same for all of them.

The module imports no Ray, so that a package's module that names `InProcess` can load a registered model, too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.errors import SpecError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import FeedSchema
from penstock.storage import Storage
from penstock.training.events import Event
from penstock.training.frameworks.framework import TriedBatch
from penstock.training.frameworks.own_trainer import blaming_the_build, refuse_unread
from penstock.training.job import TrainJob, TrainOutcome
from penstock.training.model import LearningModel, Predicts
from penstock.training.not_a_number import not_a_number
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.training.on_ray.worker import RankResult
    from penstock.training.ranks import Group
    from penstock.training.session.session import Session

__all__ = ["InProcess", "run_in_process"]

_UNREAD = {
    **dict.fromkeys(
        ("learning_rate", "clip_norm", "accumulate", "precision", "compile"), "the model decides it, from train.params"
    ),
    "callbacks": "the loop of one process calls none",
    "last_batch": "the last batch of an epoch is kept",
    "start_from": "load weights where the model is made",
}
"""Field that is not read -> what does instead."""


class _NotStarted(Predicts):
    """What can be measured of a model that will be there when the schema is known: the defaults."""


@dataclass(frozen=True)
class InProcess:
    """A `penstock.training.frameworks.framework.Framework` of a model that learns in one process: a worker of Ray.

    Attributes:
        model: called with (code, params, schema, files), where `files` is the storage of a checkpoint's, or None to begin.
        libraries, loader, model_files: as of `Framework`.
    """

    model: Callable[..., LearningModel]
    libraries: tuple[str, ...]
    loader: str
    model_files: tuple[str, ...]

    def check(self, code: UserCode, spec: TrainSpec) -> Predicts:
        """Import what `train.recipe` names.

        Raises:
            SpecError: a setting that nothing reads, or more than one worker.
        """
        refuse_unread(spec, _UNREAD)
        if spec.workers > 1:
            raise SpecError(
                f"train.workers: {spec.workers} with train.framework: {spec.framework}, which trains in one process",
                next_step="set train.workers: 1",
            )
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
        """Train in a worker of Ray."""
        from penstock.training.on_ray import trainer

        return trainer.train(job, stop=stop, listener=listener, own_cluster=own_cluster, work=run_in_process)


def run_in_process(job: TrainJob, group: Group, client: Any, *, stop: bool = False, restart: int = 0) -> RankResult:
    """Train as the only rank; arguments as of on_ray/worker.py's `run_rank`. The worker finds the framework by its name."""
    from penstock.training.frameworks.registry import FRAMEWORKS
    from penstock.training.session.attempt import run_session

    framework: Any = FRAMEWORKS.get(job.spec.framework)
    loop = partial(_fit, framework, job, group)
    return run_session(job, group, client, loop, stop=stop, restart=restart, apart=framework.model_files, restores_all=True)


def _fit(framework: InProcess, job: TrainJob, group: Group, session: Session) -> None:
    from penstock.training.session.steps import learn_batches

    newest = session.get_checkpoint()
    files = Storage(str(newest.path)) if newest is not None else None
    model = framework.model(job.code, job.spec.params, job.manifest.feed_schema, files)

    def write(folder: Path) -> None:
        for name, content in model.files().items():
            (folder / name).write_bytes(content)

    learn_batches(job, group, session, model, lambda batch: {"train/loss": model.learn(batch)}, write)
