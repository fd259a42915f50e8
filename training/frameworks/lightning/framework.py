"""How does Lightning's Trainer train a LightningModule in penstock's ranks?"""

from __future__ import annotations

from penstock.training.frameworks.lightning.library import DISTRIBUTIONS, make_module
from penstock.training.frameworks.lightning.loading import STATE, WEIGHTS, LightningModel
from penstock.training.frameworks.loops.own_loop import OwnLoop, refuse_unread
from penstock.training.model import Predicts
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
}
"""Field that is not read -> the way to do it here."""


class LightningFramework(OwnLoop):
    """See `penstock.training.frameworks.framework.Framework`."""

    needs = ("torch", tuple(DISTRIBUTIONS))
    extra = "lightning"
    loader = "penstock.training.frameworks.lightning.loading:load"
    model_files = (WEIGHTS, STATE)
    fit = "penstock.training.frameworks.lightning.loop:fit"

    def check(self, code: UserCode, spec: TrainSpec) -> Predicts:
        """Construct the module; refuse settings that only penstock's own loop reads."""
        refuse_unread(spec, _UNREAD)
        _ = self.libraries
        return LightningModel(make_module(code, spec.params), code.target)


LIGHTNING = LightningFramework()
