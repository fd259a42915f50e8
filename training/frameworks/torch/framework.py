"""What does torch do for the pipeline? It wires the recipe, the trainer on Ray and the one batch that is tried before."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import FeedSchema
from penstock.training.checkpoint.manifest import MODEL
from penstock.training.events import Event
from penstock.training.frameworks.framework import TriedBatch
from penstock.training.frameworks.torch import one_batch
from penstock.training.job import TrainJob, TrainOutcome
from penstock.training.model import Predicts
from penstock.training.on_ray import trainer
from penstock.training.recipe import load_recipe
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

__all__ = ["TORCH", "TorchFramework"]


class TorchFramework:
    """See `penstock.training.frameworks.framework.Framework`."""

    libraries = ("torch",)
    loader = "penstock.training.frameworks.torch.loading:load"
    model_files = (MODEL,)
    takes_callbacks = True

    def check(self, code: UserCode, spec: TrainSpec) -> Predicts:
        """Import and construct the recipe; refuse a learning rate that nothing would read."""
        recipe = load_recipe(code, spec.params)
        recipe.refuse_with_training_step(spec)
        if spec.set_by_user(["learning_rate"]):
            recipe.refuse_learning_rate(spec.learning_rate)
        return recipe

    def try_batch(self, code: UserCode, spec: TrainSpec, schema: FeedSchema, batch: Batch, seed: int) -> TriedBatch:
        """Augment, forward, loss, backward, predict."""
        return one_batch.try_batch(code, spec, schema, batch, seed)

    def train(
        self,
        job: TrainJob,
        *,
        stop: threading.Event,
        listener: Callable[[list[Event]], None],
        own_cluster: bool = False,
    ) -> TrainOutcome:
        """Train on Ray Train workers."""
        return trainer.train(job, stop=stop, listener=listener, own_cluster=own_cluster)


TORCH = TorchFramework()
