"""How does a recipe of torch train? Wires the recipe, the workers of Ray and the trial batch."""

from __future__ import annotations

from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import FeedSchema
from penstock.training.checkpoint.manifest import MODEL
from penstock.training.frameworks.framework import TriedBatch
from penstock.training.frameworks.on_workers import OnWorkers
from penstock.training.frameworks.torch import one_batch
from penstock.training.model import Predicts
from penstock.training.recipe import load_recipe
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

__all__ = ["TORCH", "TorchFramework"]


class TorchFramework(OnWorkers):
    """See `penstock.training.frameworks.framework.Framework`."""

    libraries = ("torch",)
    loader = "penstock.training.frameworks.torch.loading:load"
    model_files = (MODEL,)
    takes_callbacks = True

    def check(self, code: UserCode, spec: TrainSpec) -> Predicts:
        """Import and construct the recipe; refuse a learning rate that is not read."""
        recipe = load_recipe(code, spec.params)
        recipe.refuse_with_training_step(spec)
        if spec.set_by_user(["learning_rate"]):
            recipe.refuse_learning_rate(spec.learning_rate)
        return recipe

    def try_batch(self, code: UserCode, spec: TrainSpec, schema: FeedSchema, batch: Batch, seed: int) -> TriedBatch:
        """Augment, forward, loss, backward, predict."""
        return one_batch.try_batch(code, spec, schema, batch, seed)


TORCH = TorchFramework()
