"""How are the weights that `train.start_from` names loaded into a model: which fit, which are new, and which are left?"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError, TrainingError
from penstock.storage import Storage
from penstock.training.checkpoint.start_from import START

__all__ = ["describe_matching", "load_matching", "read_weights", "shapes_of", "start_weights"]

_SHOWN = 6


def start_weights(run_storage: Storage) -> dict[str, Tensor]:
    """Read the weights from the run's storage.

    Raises:
        CheckpointError: they cannot be read; only tensors are unpickled.
    """
    return read_weights(run_storage.read_bytes(START))


def read_weights(content: bytes) -> dict[str, Tensor]:
    """Read the weights of a file of `train.start_from`, on the CPU.

    Raises:
        CheckpointError: as `start_weights`.
    """
    try:
        if content[:2] == b"PK":  # torch.save's zip
            loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            state = loaded.get("state_dict", loaded.get("model", loaded))
            return {name: value for name, value in state.items() if isinstance(value, Tensor)}
        return safetensors.torch.load(content)
    except Exception as error:  # both libraries have many
        raise CheckpointError(
            f"train.start_from: the weights cannot be read: {str(error).splitlines()[0]}",
            next_step="save them with safetensors, or with torch.save(model.state_dict(), file)",
        ) from error


def describe_matching(own: Mapping[str, Sequence[int]], weights: Mapping[str, Tensor], name: str) -> str:
    """Describe which weights fit by name and shape, which are new in the model, and which are left.

    Args:
        own: name -> shape, of the model.
        name: as in `train.start_from`.

    Raises:
        TrainingError: nothing fits.
    """
    fits = {key for key, value in weights.items() if key in own and tuple(own[key]) == tuple(value.shape)}
    new, left = [key for key in own if key not in fits], [key for key in weights if key not in fits]
    if not fits:
        raise TrainingError(
            f"train.start_from: none of the {len(weights)} weights of {name} fits the model",
            problems=[f"there: {_few(shapes_of(weights))}", f"in the model: {_few(own)}"],
            next_step="name weights of the same names and shapes, or rename them in the file",
        )
    parts = [f"{len(fits)} of {len(own)} weights are those of {name}"]
    parts += [f"new: {', '.join(new[:_SHOWN])}{_more(new)}"] if new else []
    parts += [f"left: {', '.join(left[:_SHOWN])}{_more(left)}"] if left else []
    return "; ".join(parts)


def shapes_of(weights: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return name -> shape, of a model's state or a file's weights."""
    return {name: list(value.shape) for name, value in weights.items() if isinstance(value, Tensor)}


def load_matching(model: nn.Module, weights: Mapping[str, Tensor], name: str) -> str:
    """Copy the weights that fit by name and shape into the model. Returns and raises as `describe_matching`."""
    own = model.state_dict()
    description = describe_matching(shapes_of(own), weights, name)
    with torch.no_grad():
        for key, value in weights.items():
            if isinstance(own.get(key), Tensor) and own[key].shape == value.shape:
                own[key].copy_(value)
    return description


def _few(shapes: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in [*shapes.items()][:_SHOWN]) + _more(shapes)


def _more(names: Sized) -> str:
    return f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
