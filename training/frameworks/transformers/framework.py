"""How does the transformers Trainer train a model in penstock's ranks?"""

from __future__ import annotations

from penstock.training.frameworks.loops.own_loop import OwnLoop, refuse_unread
from penstock.training.frameworks.transformers.library import UsersModel
from penstock.training.frameworks.transformers.loading import CONFIG, WEIGHTS, TransformersModel
from penstock.training.model import Predicts
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

__all__ = ["TRANSFORMERS", "TransformersFramework"]

_UNREAD = {
    "learning_rate": "give params.learning_rate, a TrainingArgument",
    "clip_norm": "give params.max_grad_norm; the default is 1.0",
    "accumulate": "raise train.batch_rows",
    "compile": "call torch.compile where the model is built",
    "callbacks": "name a Trainer of your own: trainer = MyTrainer in the recipe's class",
    "last_batch": "the last batch of an epoch is kept",
}
"""Field that is not read -> the way to do it here."""


class TransformersFramework(OwnLoop):
    """See `penstock.training.frameworks.framework.Framework`."""

    needs = ("torch", "transformers", "accelerate")
    extra = "transformers"
    loader = "penstock.training.frameworks.transformers.loading:load"
    model_files = (WEIGHTS, CONFIG)
    fit = "penstock.training.frameworks.transformers.loop:fit"

    def check(self, code: UserCode, spec: TrainSpec) -> Predicts:
        """Import the user's code and sort `train.params`; refuse settings that only penstock's own loop reads."""
        refuse_unread(spec, _UNREAD)
        _ = self.libraries
        return TransformersModel(UsersModel(code, spec.params), None, None, code.target)


TRANSFORMERS = TransformersFramework()
