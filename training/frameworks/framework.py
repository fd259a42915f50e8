"""What does a training framework do for the pipeline? Six things; docs/extend/framework.md has a small one.

Everything else is the same for all frameworks: stage keys, the ledger, the refusal to resume on other data, the feed, the
commit of checkpoints (`penstock.training.checkpoint.store.CheckpointStore`), metrics and figures, tracking, registration.

The feed is the same, too: batches are dicts of torch tensors, on the CPU unless the framework asks otherwise. A framework of
another kind takes `column.numpy()`, which copies nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from penstock.config import Section
from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import FeedSchema
from penstock.training.events import Event
from penstock.training.job import TrainJob, TrainOutcome
from penstock.training.model import Predicts
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

__all__ = ["Framework", "HasOwnSteps", "TriedBatch"]


class TriedBatch(Section):
    """What one batch told of a model that is not trained yet."""

    loss: float | None
    """Mean over the batch's rows, before anything is learned; finite. None where no batch can be tried."""
    parameters: int
    """How many numbers are learned."""
    weights_bytes: int
    """The least that a checkpoint takes."""
    checkpoint_bytes: int
    """What it takes as a rule, with the state of the optimizer."""
    predict_shape: list[int] | None
    """Of the predictions; None where the model cannot predict."""
    weights: dict[str, list[int]] | None = None
    """Name -> shape of the model's weights, for a framework that takes `train.start_from`."""
    logged: list[str] | None = None
    """What a validation charts besides the loss and the usual metrics, `val/<name>`; None where only training tells."""


class Framework(Protocol):
    """One training framework. Stateless: the same object serves every pipeline of a process."""

    @property
    def libraries(self) -> tuple[str, ...]:
        """Distributions whose version decides what is trained; the train stage's key holds their versions.

        The version of the package that adds the framework is in the key anyway.

        Raises:
            PreflightError: one that the framework needs is not installed.
        """
        ...

    @property
    def loader(self) -> str:
        """`module:function` that rebuilds a trained model, as `ModelSpec.loader`.

        The module must import no Ray: the users of a model registry load it.
        """
        ...

    @property
    def model_files(self) -> tuple[str, ...]:
        """Those files of a checkpoint that a trained model is loaded from; a model registry keeps them."""
        ...

    def check(self, code: UserCode, spec: TrainSpec) -> Predicts:
        """Load what will be trained, so that its first error costs nothing. In the driver, before any stage.

        Args:
            code: what `train.recipe` names.
            spec: the train section; `params` belong to the user, other fields that the framework cannot honour it may refuse.

        Raises:
            SpecError: what cannot be loaded, or which field does not fit.
        """
        ...

    def try_batch(self, code: UserCode, spec: TrainSpec, schema: FeedSchema, batch: Batch, seed: int) -> TriedBatch:
        """Do with a row or two what training will do with every batch. Before any stage; with RAY_ADDRESS, in a Ray task.

        The batch is on the CPU. The process has what one training worker has, GPUs too.

        Raises:
            TrainingError: the user's code fails, or the loss is not finite.
        """
        ...

    def train(
        self,
        job: TrainJob,
        *,
        stop: threading.Event,
        listener: Callable[[list[Event]], None],
        own_cluster: bool = False,
    ) -> TrainOutcome:
        """Train to the end of the spec, or until `stop` is set; continue from the newest checkpoint that can be trusted.

        Runs in the driver, connected to Ray; it may work there, in Ray tasks or in actors. It opens feeds by
        `penstock.training.open_feeds.open_job_feed`, commits through a `CheckpointStore` of `job.run_storage`, and returns what
        `penstock.training.checkpoint.outcome.outcome_of` makes. Whether the newest checkpoint is of the same data, order and
        batch size has been checked.

        Args:
            job: what to train on, and where checkpoints go.
            stop: when set, save and return with `interrupted`.
            listener: gets events (penstock.training.events) in order, in this thread: points for the tracker,
                `CheckpointCommitted`, `TrainProgress`, `Resumed`, `Warned`. It must be called often enough to look alive.
            own_cluster: the Ray cluster is this process's own, and will not grow.

        Raises:
            TrainingError: training failed.
            CheckpointError: a checkpoint cannot be written, or none can be trusted.
        """
        ...


@runtime_checkable
class HasOwnSteps(Protocol):
    """What a framework may say besides: a step is no batch of `train.batch_rows` rows, and `penstock rows` cannot tell its."""

    @property
    def a_step(self) -> str:
        """What it is instead: "a step is ..."."""
        ...
