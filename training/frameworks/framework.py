"""Which five members does a training framework have? docs/extend/framework.md shows a small one.

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

__all__ = ["Framework", "TriedBatch", "TriesBatch"]


class TriedBatch(Section):
    """Facts about an untrained model, from one batch."""

    loss: float | None = None
    """Mean over the batch's rows, before anything is learned; finite. None where no batch can be tried."""
    parameters: int = 0
    """Number of trainable weights."""
    predict_shape: list[int] | None = None
    """Shape of the predictions; None where the model cannot predict."""
    weights: dict[str, list[int]] | None = None
    """Name -> shape of the model's weights, for a framework that takes `train.start_from`."""
    logged: list[str] | None = None
    """Charts of a validation besides the loss and the usual metrics, `val/<name>`; None where only training shows them."""


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
        """Files of a checkpoint that a trained model is loaded from; a model registry keeps them."""
        ...

    def check(self, code: UserCode, spec: TrainSpec) -> Predicts:
        """Load the user's code, so that its first error costs nothing. In the driver, before any stage.

        Args:
            code: the code of `train.recipe`.
            spec: the train section; refuse fields that the framework cannot honour. `params` belong to the user.

        Raises:
            SpecError: the code cannot be loaded, or a field does not fit.
        """
        ...

    def train(
        self, job: TrainJob, *, stop: threading.Event, listener: Callable[[list[Event]], None], own_cluster: bool = False
    ) -> TrainOutcome:
        """Train to the end of the spec, or until `stop` is set; continue from the newest checkpoint that can be trusted.

        Runs in the driver, connected to Ray; it may work there, in Ray tasks or in actors. It opens feeds by
        `penstock.training.open_feeds.open_job_feed`, commits through a `CheckpointStore` of `job.run_storage`, and returns the
        result of `penstock.training.checkpoint.outcome.outcome_of`. The newest checkpoint has been checked: it is of the same
        data, order and batch size.

        Args:
            job: the data, the settings, the place of checkpoints.
            stop: when set, save and return with `interrupted`.
            listener: gets events (penstock.training.events) in order, in this thread: points for the tracker,
                `CheckpointCommitted`, `TrainProgress`, `Resumed`, `Warned`. Call it every few seconds.
            own_cluster: the Ray cluster is this process's own, and will not grow.

        Raises:
            TrainingError: training failed.
            CheckpointError: a checkpoint cannot be written, or none can be trusted.
        """
        ...


@runtime_checkable
class TriesBatch(Protocol):
    """A framework that tries one batch before any stage. Of others on Ray's workers, two batches are trained in a process."""

    def try_batch(self, code: UserCode, spec: TrainSpec, schema: FeedSchema, batch: Batch, seed: int) -> TriedBatch:
        """Train on a row or two; with RAY_ADDRESS, in a Ray task. The batch is on the CPU.

        Raises:
            TrainingError: the user's code fails, or the loss is not finite.
        """
        ...
