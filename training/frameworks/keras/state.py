"""How does all that a Keras model has learned become one file, the same bytes for the same values? No pickle, no archive."""

from __future__ import annotations

from typing import Any

import numpy as np
import safetensors.numpy

from penstock.errors import CheckpointError

__all__ = ["OPTIMIZER", "WEIGHTS", "WHOLE", "read_variables", "written_variables"]

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
"""In a checkpoint: the model's variables, those of its random layers too, and the optimizer's. The first is registered."""

WHOLE = "model.keras"
"""The model with its architecture, as `keras.models.load_model` reads it; registered, too."""


def written_variables(variables: list[Any]) -> bytes:
    """The values in their order, by `number/path`."""
    return safetensors.numpy.save({name: np.array(_values(variable)) for name, variable in _named(variables).items()})


def read_variables(content: bytes, variables: list[Any], what: str) -> None:
    """Put the values back.

    Raises:
        CheckpointError: they are not of these variables.
    """
    found, wanted = safetensors.numpy.load(content), _named(variables)
    shapes = {name: tuple(variable.shape) for name, variable in wanted.items()}
    if {name: values.shape for name, values in found.items()} != shapes:
        raise CheckpointError(f"{what} does not fit the model: it has {sorted(found)[:6]}, the model {sorted(wanted)[:6]}")
    for name, variable in wanted.items():
        variable.assign(found[name])


def _named(variables: list[Any]) -> dict[str, Any]:
    # Names that Keras counts up in a process (dense, dense_1) would differ after a restart.
    return {f"{number:04d}/{variable.name}": variable for number, variable in enumerate(variables)}


def _values(variable: Any) -> np.ndarray:
    import keras

    return np.asarray(keras.ops.convert_to_numpy(variable.value))
