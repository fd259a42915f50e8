"""How does the transformers Trainer train a model in penstock's ranks?"""

from __future__ import annotations

import torch

from penstock.errors import TrainingError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import FeedSchema
from penstock.training.checkpoint.matching import shapes_of
from penstock.training.frameworks.framework import TriedBatch
from penstock.training.frameworks.loops.own_loop import OwnLoop, refuse_unread, require_installed
from penstock.training.frameworks.transformers.library import UsersModel
from penstock.training.frameworks.transformers.loading import CONFIG, WEIGHTS, TransformersModel
from penstock.training.model import Predicts
from penstock.training.rng import seed_rng
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

    loader = "penstock.training.frameworks.transformers.loading:load"
    model_files = (WEIGHTS, CONFIG)
    fit = "penstock.training.frameworks.transformers.loop:fit"

    @property
    def libraries(self) -> tuple[str, ...]:
        """Torch, transformers and accelerate."""
        return ("torch", *require_installed("transformers", "transformers", "accelerate"))

    def check(self, code: UserCode, spec: TrainSpec) -> Predicts:
        """Import the user's code and sort `train.params`; refuse settings that only penstock's own loop reads."""
        refuse_unread(spec, _UNREAD)
        _ = self.libraries
        return TransformersModel(UsersModel(code, spec.params), None, None, code.target)

    def try_batch(self, code: UserCode, spec: TrainSpec, schema: FeedSchema, batch: Batch, seed: int) -> TriedBatch:
        """Forward, loss, backward, predict."""
        seed_rng(seed)
        users = UsersModel(code, spec.params)
        module = users.build(schema)
        model = TransformersModel(users, module, schema, code.target)
        found = model.loss(dict(batch.columns))
        value = float(found.detach())
        if not torch.isfinite(found) or not found.requires_grad:
            raise TrainingError(
                f"{code.target}: the loss of the first batch is {value}",
                next_step="check the columns' values, and the inputs of the model's loss: usually a label (data.label)",
            )
        found.backward()  # type: ignore[no-untyped-call]
        module.eval()
        shape = None
        if schema.label is not None:
            with torch.no_grad():
                shape = list(model.predict(dict(batch.columns), batch.rows).shape)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        return TriedBatch(
            loss=value,
            parameters=parameters,
            weights_bytes=parameters * 4,
            checkpoint_bytes=parameters * 12,
            predict_shape=shape,
            weights=shapes_of(module.state_dict()),
        )


TRANSFORMERS = TransformersFramework()
