"""How is a trained Hugging Face model loaded, from a checkpoint or a registry? Without Ray."""

from __future__ import annotations

from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError, TrainingError
from penstock.ingest.schema import FeedSchema
from penstock.storage import Storage
from penstock.training.frameworks.transformers.library import UsersModel
from penstock.training.model import ClassScores, ModelSpec, TrainedModel, own_device

__all__ = ["CONFIG", "WEIGHTS", "TransformersModel", "load"]

WEIGHTS, CONFIG = "model.safetensors", "config.json"
"""In a checkpoint and with a registered model, as `save_pretrained` writes them: `from_pretrained` reads the folder."""


class TransformersModel(TrainedModel):
    """See `penstock.training.model.TrainedModel`."""

    def __init__(self, users: UsersModel, model: nn.Module | None, schema: FeedSchema | None, target: str) -> None:
        self._users, self._model, self._schema, self._target = users, model, schema, target

    @property
    def predicts(self) -> ClassScores:
        """The user's class decides."""
        return self._users.predicts

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self._weighted.parameters()).device

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Compute the model's own loss."""
        found = self._call(batch).get("loss")
        return found.reshape(()) if isinstance(found, Tensor) else torch.tensor(torch.nan)

    def predict(self, batch: dict[str, Tensor], rows: int) -> Tensor:
        """Compute the logits; one number a row is a value, [rows]."""
        label = self._schema.label if self._schema is not None else None
        logits = self._call({name: column for name, column in batch.items() if name != label}).get("logits")
        if not isinstance(logits, Tensor):
            raise TrainingError(f"{self._target}: the model's output has no logits, so it predicts nothing")
        return logits.squeeze(-1) if logits.ndim == 2 and logits.shape[1] == 1 else logits

    @property
    def _weighted(self) -> nn.Module:
        assert self._model is not None, "an untrained model has no weights"
        return self._model

    def _call(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        label = self._schema.label if self._schema is not None else None
        output = self._weighted(**self._users.inputs(self._weighted, batch, label))
        if not hasattr(output, "get"):
            raise TrainingError(
                f"{self._target}: the model returned a {type(output).__name__}, without names",
                next_step="return an output of transformers, or a dict with loss and logits",
            )
        return output  # type: ignore[no-any-return]


def load(spec: ModelSpec, files: Storage) -> TransformersModel:
    """Load the model with its weights, in eval mode; on a GPU if this process has one.

    Raises:
        CheckpointError: the weights do not fit the model.
    """
    users = UsersModel(spec.code, spec.params)
    model = users.build(spec.feed_schema)
    own = model.state_dict()
    tied = {name: own[name] for name in getattr(model, "all_tied_weights_keys", None) or () if name in own}
    try:  # tied weights are saved once, by their other name
        model.load_state_dict({**tied, **safetensors.torch.load(files.read_bytes(WEIGHTS))})
    except RuntimeError as error:
        raise CheckpointError(f"the weights in {files.uri(WEIGHTS)} do not fit {spec.code.target}: {error}") from error
    device = own_device()
    return TransformersModel(users, model.to(device).eval(), spec.feed_schema, spec.code.target)
