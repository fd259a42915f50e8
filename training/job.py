"""Which data does a worker group train from? Plain data that pickles, made by the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from penstock.config import OnResume, Section, resume_rules
from penstock.ingest.feed.batch import FeedShare
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.schema import Split
from penstock.ingest.shuffle.order import Order
from penstock.storage import Storage
from penstock.training.spec import TrainSpec

if TYPE_CHECKING:
    from penstock.ingest.feed.cursor import Feed
    from penstock.usercode.capture import UserCode

__all__ = ["RECIPE_CODE", "RECIPE_PARAMS", "CallbackCode", "FeedOpener", "TrainJob", "TrainOutcome"]

FeedOpener = Callable[["TrainJob", Split, int, int], "Feed"]
"""(job, split, rank, world size) -> feed. Picklable; called in the workers at every start."""

RECIPE_CODE, RECIPE_PARAMS = "the recipe's code", "train.params"
"""Names among a checkpoint's settings."""

_MEASURED = ("train.workers", "train.gpus", "train.cpus_per_worker")
"""Settings whose effect on the bits is measured, not read from the spec."""


@dataclass(frozen=True)
class CallbackCode:
    """One entry of `train.callbacks`. Picklable.

    Attributes:
        name: of a built-in callback, of a package's, or `file.py:Name`.
        code: of `file.py:Name`.
        origin: of a package's callback, as of `Plugins.origin`.
    """

    name: str
    params: dict[str, Any]
    code: UserCode | None = None
    origin: str | None = None


@dataclass(frozen=True)
class TrainJob:
    """One attempt at training.

    Attributes:
        run_storage: rooted at the run; checkpoints and the journal go there.
        data_storage: holds the shards of `manifest`.
        order: sample order of the train split.
        seed: of weight initialisation, dropout and augmentation.
        code: the recipe.
        attempt: number of this attempt, from 1.
        identity: values that must be equal in a checkpoint to continue from it.
        open_feeds: None reads the shards from disk.
        callbacks: of `train.callbacks`.
        data_config: the code that `train.datasets` names.
        hosts: by rank, of the run's worker group before: ranks stay on their nodes.
    """

    run_storage: Storage
    data_storage: Storage
    manifest: DatasetManifest
    order: Order
    spec: TrainSpec
    seed: int
    code: UserCode
    attempt: int
    pipeline: str
    identity: dict[str, str] = field(default_factory=dict)
    open_feeds: FeedOpener | None = None
    callbacks: tuple[CallbackCode, ...] = ()
    data_config: UserCode | None = None
    hosts: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that may change on a resume at the price of bit-exactness, by dotted path in the pipeline file."""
        values = self.spec.model_dump(mode="json")
        warned = (path for path, rule in resume_rules(TrainSpec) if rule is OnResume.WARN and "." not in path)
        settings = {f"train.{path}": values[path] for path in warned if f"train.{path}" not in _MEASURED}
        best = self.spec.checkpoint.best
        if best is not None:
            settings["train.checkpoint.best"] = best.model_dump(mode="json")
        if self.spec.backend.name is not None:
            settings["train.backend.name"] = self.spec.backend.name
        if best is not None or self.callbacks:  # validations decide then which weights are kept, or when training ends
            settings["train.validate_every_steps"] = self.spec.validate_every_steps
        theirs: dict[str, Any] = {f"package of {each.name}": each.origin for each in self.callbacks if each.origin}
        theirs |= {f"code of {each.name}": {**each.code.reached, **each.code.versions} for each in self.callbacks if each.code}
        if self.data_config is not None:
            theirs[f"code of {self.data_config.target}"] = {**self.data_config.reached, **self.data_config.versions}
        return {**settings, **theirs, RECIPE_CODE: {**self.code.reached, **self.code.versions}}

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole training; None if they depend on the rows' lengths."""
        if self.order.by_length is not None and self.order.by_length.batch_entries is not None:
            return self.spec.max_steps
        rows = FeedShare(self.spec.batch_rows, last=self.spec.last_batch).positions(self.order.epoch_rows)
        per_epoch = -(-rows // self.spec.batch_rows)
        steps = per_epoch * self.spec.epochs
        return min(steps, self.spec.max_steps) if self.spec.max_steps is not None else steps


class TrainOutcome(Section):
    """The result of one attempt."""

    status: Literal["finished", "interrupted"]
    step: int
    epoch: int
    position: int
    checkpoint: str | None
    """Name of the newest checkpoint; None only when a stop came before the first."""
    best_checkpoint: str | None = None
    model_step: int
    """Optimizer steps of the weights to register."""
    weights_digest: str
    """Of the weights to register: the best checkpoint's if `train.checkpoint.best` is set, else the newest one's."""
    metrics: dict[str, float]
    """Measured on the weights to register."""
    exactness: str
    resumed_from_step: int | None = None
    restarts: int = 0
    """Restarts of the worker group within the attempt."""
    warnings: list[str] = Field(default_factory=list)
    returned: list[Any] | None = None
    """What a user's function returned on each rank; None if it returned nothing."""
    world_size: int
