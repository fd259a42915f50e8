"""How does a trained Keras model come back: from a checkpoint to be measured, from a registry to answer? Without Ray."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.ingest.schema import FeedSchema
from penstock.storage import Storage
from penstock.training.frameworks.keras.library import build, inputs_of
from penstock.training.frameworks.keras.state import WEIGHTS, read_variables
from penstock.training.model import ClassScores, ModelSpec, TrainedModel

__all__ = ["KerasModel", "load"]


class KerasModel(TrainedModel):
    """See `penstock.training.model.TrainedModel`."""

    def __init__(self, model: Any, schema: FeedSchema, target: str) -> None:
        self._model, self._schema, self._target = model, schema, target

    @property
    def predicts(self) -> ClassScores:
        """Probabilities, as Keras' models end in a softmax; logits where its loss has `from_logits`."""
        config: dict[str, Any] = getattr(self._model.loss, "get_config", dict)()
        return "logits" if config.get("from_logits") else "probabilities"

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """As the model is compiled."""
        inputs = inputs_of(self._model, batch, self._schema, self._target)
        label = batch[str(self._schema.label)].numpy() if self._schema.label is not None else None
        found = self._model.compute_loss(inputs, label, self._model(inputs, training=False), training=False)
        return torch.as_tensor(float(_array(found)))

    def predict(self, batch: dict[str, Tensor], rows: int) -> Tensor:
        """Its output; one number of a row is a value."""
        output = torch.from_numpy(np.array(_array(self._model(inputs_of(self._model, batch, self._schema, self._target)))))
        return output.squeeze(-1) if output.ndim == 2 and output.shape[1] == 1 else output


def load(spec: ModelSpec, files: Storage) -> KerasModel:
    """The model with its weights.

    Raises:
        CheckpointError: the weights do not fit the model.
    """
    model = build(spec.code, spec.params, spec.feed_schema)
    read_variables(files.read_bytes(WEIGHTS), model.variables, files.uri(WEIGHTS))
    return KerasModel(model, spec.feed_schema, spec.code.target)


def _array(value: Any) -> np.ndarray:
    import keras

    return np.asarray(keras.ops.convert_to_numpy(value))
