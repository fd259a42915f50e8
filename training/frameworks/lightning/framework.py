"""How does Lightning's Trainer train a LightningModule in penstock's ranks?"""

from __future__ import annotations

import torch

from penstock.errors import PreflightError, TrainingError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import FeedSchema
from penstock.training.frameworks.framework import TriedBatch
from penstock.training.frameworks.lightning.library import DISTRIBUTIONS, make_module
from penstock.training.frameworks.lightning.loading import WEIGHTS, LightningModel
from penstock.training.frameworks.on_workers import OwnLoop, installed, refuse_unread
from penstock.training.frameworks.torch.one_batch import without_label
from penstock.training.model import Predicts
from penstock.training.rng import seed_rng
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

__all__ = ["LIGHTNING", "LightningFramework"]

_UNREAD = {
    "learning_rate": "configure_optimizers() sets it, from train.params if you like",
    "accumulate": "raise train.batch_rows, or optimize by hand in training_step()",
    "compile": "call torch.compile in configure_model()",
    "callbacks": "configure_callbacks() returns Lightning's",
    "validate_every_steps": "the end of each epoch validates",
    "last_batch": "the last batch of an epoch is kept",
    "start_from": "load weights in configure_model()",
}
"""Field that is not read -> the way to do it here."""


class LightningFramework(OwnLoop):
    """See `penstock.training.frameworks.framework.Framework`."""

    loader = "penstock.training.frameworks.lightning.loading:load"
    model_files = (WEIGHTS,)
    fit = "penstock.training.frameworks.lightning.loop:fit"

    @property
    def libraries(self) -> tuple[str, ...]:
        """Torch and the installed Lightning."""
        there = installed(*DISTRIBUTIONS)
        if not there:
            raise PreflightError("train.framework: lightning is not installed", next_step='pip install "penstock[lightning]"')
        return ("torch", *there)

    def check(self, code: UserCode, spec: TrainSpec) -> Predicts:
        """Construct the module; refuse settings that only penstock's own loop reads."""
        refuse_unread(spec, _UNREAD)
        _ = self.libraries
        return LightningModel(make_module(code, spec.params), code.target)

    def try_batch(self, code: UserCode, spec: TrainSpec, schema: FeedSchema, batch: Batch, seed: int) -> TriedBatch:
        """Forward, loss, backward, predict; and make the optimizers."""
        seed_rng(seed)
        module = make_module(code, spec.params)
        model = LightningModel(module, code.target)
        columns = dict(batch.columns)
        found = model.loss(columns)
        value = float(found.detach())
        if isinstance(module.automatic_optimization, bool) and module.automatic_optimization and not torch.isfinite(found):
            raise TrainingError(
                f"{code.target}: the loss of the first batch is {value}",
                next_step="check the columns' values (scale, missing values), and return the loss of the step",
            )
        module.configure_optimizers()
        shape = None
        if model.can_predict:
            with torch.no_grad():
                shown = LightningModel(module.eval(), code.target)
                shape = list(without_label(lambda given: shown.predict(given, batch.rows), columns, schema.label).shape)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        loss = value if torch.isfinite(found) else None
        return TriedBatch(
            loss=loss,
            parameters=parameters,
            weights_bytes=parameters * 4,
            checkpoint_bytes=parameters * 16,
            predict_shape=shape,
        )


LIGHTNING = LightningFramework()
