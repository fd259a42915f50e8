"""How is a trained Keras model saved, and loaded from a checkpoint or a registry? Without Ray, pickle and archives."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.ingest.schema import FeedSchema
from penstock.storage import Storage
from penstock.training.frameworks.keras.library import build, inputs_of
from penstock.training.model import ClassScores, ModelSpec, TrainedModel

__all__ = ["OPTIMIZER", "WEIGHTS", "WHOLE", "KerasModel", "load", "read_variables", "variables_of", "written_variables"]

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
"""In a checkpoint: the model's variables, with those of its random layers, and the optimizer's. The first is registered."""

WHOLE = "model.keras"
"""The model with its architecture, as `keras.models.load_model` reads it; registered, too."""

_COUNTED = re.compile(r"_\d+(?=_|$)")
"""The number that Keras puts into the name of each layer; it depends on the layers that the process has made before. An
optimizer's variables contain the names of the layers."""


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
        """Compute the loss that the model is compiled with."""
        inputs = inputs_of(self._model, batch, self._schema, self._target)
        label = batch[str(self._schema.label)].numpy() if self._schema.label is not None else None
        found = self._model.compute_loss(inputs, label, self._model(inputs, training=False), training=False)
        return torch.as_tensor(float(_array(found)))

    def predict(self, batch: dict[str, Tensor], rows: int) -> Tensor:
        """Call the model; one number a row is a value, [rows]."""
        output = torch.from_numpy(np.array(_array(self._model(inputs_of(self._model, batch, self._schema, self._target)))))
        return output.squeeze(-1) if output.ndim == 2 and output.shape[1] == 1 else output


def load(spec: ModelSpec, files: Storage) -> KerasModel:
    """Load the model with its weights.

    Raises:
        CheckpointError: the weights do not fit the model.
    """
    model = build(spec.code, spec.params, spec.feed_schema)
    if not model.built:  # a subclass has variables after its first batch
        columns = spec.feed_schema.columns
        empty = {each.name: torch.zeros(1, *each.shape, dtype=getattr(torch, each.dtype)) for each in columns}
        model(inputs_of(model, empty, spec.feed_schema, spec.code.target))
    read_variables(files.read_bytes(WEIGHTS), variables_of(model), files.uri(WEIGHTS))
    return KerasModel(model, spec.feed_schema, spec.code.target)


def variables_of(model: Any) -> list[Any]:
    """Return the model's variables and, with torch as backend, the buffers of modules in it, which share their memory."""
    import keras

    layers = model._flatten_layers() if keras.backend.backend() == "torch" else ()
    buffers = {id(buffer): buffer for layer in layers for buffer in layer.buffers()}
    return [*model.variables, *(keras.Variable(buffer, trainable=False, name="buffer") for buffer in buffers.values())]


def written_variables(variables: list[Any]) -> bytes:
    """Encode the values in their order, by `number/path`: equal bytes for equal values."""
    return safetensors.numpy.save({name: np.array(_array(variable.value)) for name, variable in _named(variables).items()})


def read_variables(content: bytes, variables: list[Any], what: str) -> None:
    """Assign the values of a file.

    Raises:
        CheckpointError: the file is of other variables.
    """
    found = {_COUNTED.sub("", name): values for name, values in safetensors.numpy.load(content).items()}
    wanted = _named(variables)
    shapes = {name: tuple(variable.shape) for name, variable in wanted.items()}
    if {name: values.shape for name, values in found.items()} != shapes:
        raise CheckpointError(f"{what} does not fit the model: it has {sorted(found)[:6]}, the model {sorted(wanted)[:6]}")
    for name, variable in wanted.items():
        variable.assign(found[name])


def _named(variables: list[Any]) -> dict[str, Any]:
    return {f"{number:04d}/{_COUNTED.sub('', variable.name)}": variable for number, variable in enumerate(variables)}


def _array(value: Any) -> np.ndarray:
    import keras

    if keras.backend.standardize_dtype(value.dtype) == "bfloat16":  # not of NumPy
        value = keras.ops.cast(value, "float32")
    return np.asarray(keras.ops.convert_to_numpy(value))
