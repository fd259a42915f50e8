"""How does all that a Keras model has learned become one file, the same bytes for the same values? No pickle, no archive."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import safetensors.numpy

from penstock.errors import CheckpointError

__all__ = ["OPTIMIZER", "WEIGHTS", "WHOLE", "read_variables", "written_variables"]

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
"""In a checkpoint: the model's variables, those of its random layers too, and the optimizer's. The first is registered."""

WHOLE = "model.keras"
"""The model with its architecture, as `keras.models.load_model` reads it; registered, too."""


_COUNTED = re.compile(r"_\d+(?=_|$)")
"""What Keras counts up in names, for every layer that a process makes: another process, or a later model, has other numbers.
An optimizer's variables have the names of the layers in theirs."""


def written_variables(variables: list[Any]) -> bytes:
    """The values in their order, by `number/path`."""
    return safetensors.numpy.save({name: np.array(_values(variable)) for name, variable in _named(variables).items()})


def read_variables(content: bytes, variables: list[Any], what: str) -> None:
    """Put the values back.

    Raises:
        CheckpointError: they are not of these variables.
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


def _values(variable: Any) -> np.ndarray:
    import keras

    return np.asarray(keras.ops.convert_to_numpy(variable.value))
