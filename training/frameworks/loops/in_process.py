"""How does a model that learns in one process, batch by batch, become a framework?

The module imports no Ray, so that a package's module that names `InProcess` can load a registered model, too.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from penstock.errors import SpecError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import FeedSchema
from penstock.storage import Storage
from penstock.training.frameworks.framework import TriedBatch
from penstock.training.frameworks.loops.own_loop import build_user_model, refuse_unread
from penstock.training.frameworks.on_workers import OnWorkers
from penstock.training.job import TrainJob
from penstock.training.model import Predicts, TrainedModel, UsualPredicts
from penstock.training.not_a_number import IN_THE_MODEL, not_a_number
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.training.on_ray.worker import RankResult
    from penstock.training.ranks import Group
    from penstock.training.session.session import Session

__all__ = ["InProcess", "LearningModel", "run_in_process"]

_UNREAD = {
    **dict.fromkeys(
        ("learning_rate", "clip_norm", "accumulate", "precision", "compile"), "set it in the model, from train.params"
    ),
    "callbacks": "this loop calls no callbacks",
    "last_batch": "the last batch of an epoch is kept",
    "start_from": "load weights where the model is made",
}
"""Field that is not read -> the way to do it here."""


class LearningModel(TrainedModel, Protocol):
    """A model that learns from one batch after the other, for `InProcess`."""

    num_parameters: int = 0
    """Number of trainable weights, for `penstock check`."""

    @abstractmethod
    def learn(self, batch: dict[str, Tensor]) -> float:
        """Learn from one step's rows; returns their mean loss."""

    @abstractmethod
    def files(self) -> Mapping[str, bytes]:
        """Encode the learned state by file name, for the framework's loader. Equal weights give equal bytes."""


@dataclass(frozen=True)
class InProcess(OnWorkers):
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
        """Import the code of `train.recipe`.

        Raises:
            SpecError: a setting is not read, or there is more than one worker.
        """
        refuse_unread(spec, _UNREAD)
        if spec.workers > 1:
            raise SpecError(
                f"train.workers: {spec.workers} with train.framework: {spec.framework}, which trains in one process",
                next_step="set train.workers: 1",
            )
        code.load()
        return UsualPredicts()

    def try_batch(self, code: UserCode, spec: TrainSpec, schema: FeedSchema, batch: Batch, seed: int) -> TriedBatch:
        """Learn from the rows, and predict them.

        Raises:
            SpecError: the model cannot be made, as with params that it does not take.
        """
        model: LearningModel = build_user_model(code, lambda: self.model(code, spec.params, schema, None))
        columns = dict(batch.columns)
        loss = model.learn(columns)
        if not math.isfinite(loss):
            raise not_a_number(f"{code.target}: the loss of the first batch is {loss}", IN_THE_MODEL)
        size = sum(map(len, model.files().values()))
        shape = list(model.predict(columns, batch.rows).shape) if model.can_predict else None
        return TriedBatch(
            loss=loss, parameters=model.num_parameters, weights_bytes=size, checkpoint_bytes=size, predict_shape=shape
        )

    @property
    def run_rank(self) -> Callable[..., RankResult]:
        """Runs the model in a session; the worker finds the framework by its name."""
        return run_in_process


def run_in_process(job: TrainJob, group: Group, client: Any, *, stop: bool = False, restart: int = 0) -> RankResult:
    """Train as the only rank; arguments as of on_ray/worker.py's `run_rank`."""
    from penstock.training.frameworks.registry import FRAMEWORKS
    from penstock.training.session.attempt import run_session

    framework: Any = FRAMEWORKS.get(job.spec.framework)
    loop = partial(_fit, framework, job, group)
    return run_session(job, group, client, loop, stop=stop, restart=restart, separate=framework.model_files, restores_all=True)


def _fit(framework: InProcess, job: TrainJob, group: Group, session: Session) -> None:
    from penstock.training.frameworks.loops.steps import learn_batches

    newest = session.get_checkpoint()
    files = Storage(str(newest.path)) if newest is not None else None
    model = framework.model(job.code, job.spec.params, job.manifest.feed_schema, files)

    def write(folder: Path) -> None:
        for name, content in model.files().items():
            (folder / name).write_bytes(content)

    learn_batches(job, group, session, model, lambda batch: {"train/loss": model.learn(batch)}, write)
