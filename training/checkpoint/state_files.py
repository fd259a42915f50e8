"""What do the two files of a torch checkpoint contain, and how are weights digested?

Both are safetensors files. One holds the weights by name. The other holds the tensors of the training state and `tree`, the
rest of it (packed.py), and `ranks`, the random generators as training/rng.py captures them.
"""

from __future__ import annotations

import io
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from penstock.digest import arrays_digest
from penstock.errors import TrainingError
from penstock.storage import Storage
from penstock.training.checkpoint.manifest import MODEL, CheckpointFacts
from penstock.training.checkpoint.packed import pack, unpack
from penstock.training.checkpoint.store import Snapshot
from penstock.training.faults import not_a_number

__all__ = [
    "TRAINING",
    "NamedTensors",
    "loadable",
    "saved_extra",
    "tensors_of",
    "torch_snapshot",
    "training_file",
    "training_of",
    "weights_digest",
    "weights_of",
    "with_extra",
]

TRAINING = "training.safetensors"
"""Optimizer, scheduler, gradient scaler, every rank's random generators."""


def tensors_of(state_dict: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the tensors of a state_dict, without the extra state of some modules."""
    return {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}


def saved_extra(state_dict: Mapping[str, object]) -> dict[str, Tensor]:
    """Encode the extra state of modules (`get_extra_state`) that is not a tensor: `<name>.pt`, the bytes of torch.save."""
    return {f"{name}.pt": loadable(value, name) for name, value in state_dict.items() if not isinstance(value, Tensor)}


def loadable(value: Any, place: str = "", *, packs: bool = False) -> Tensor:
    """Encode a value, or what `pack` leaves of it. Raises TrainingError: a part, named with its type, could not be loaded."""
    stream = io.BytesIO()
    try:
        torch.save(pack(value)["tree"] if packs else value, stream)
        stream.seek(0)
        torch.load(stream, "cpu", weights_only=True)
    except Exception as error:  # torch refuses unknown types with several classes
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        for key, part in parts:
            loadable(part, f"{place}.{key}".lstrip("."), packs=packs)
        raise TrainingError(
            f"the state {place} is of {type(value)}, which cannot be kept in a checkpoint",
            next_step="keep only tensors, numbers, strings, lists and dicts, such as float(x) of a number of numpy",
        ) from error
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


def with_extra(weights: Mapping[str, Tensor], names: Container[str]) -> dict[str, Any]:
    """Decode the extra state among the weights of a checkpoint, for `load_state_dict`; `names` are those of the model."""
    found: dict[str, Any] = {}
    for name, value in weights.items():
        if name in names or not name.endswith(".pt") or value.dtype is not torch.uint8:
            found[name] = value
        else:
            found[name.removesuffix(".pt")] = torch.load(io.BytesIO(value.numpy().tobytes()), weights_only=True)
    return found


def weights_digest(state_dict: Mapping[str, object]) -> str:
    """Digest names, dtypes, shapes and bytes of a state_dict (32 hex characters), whatever the device and memory layout."""
    return arrays_digest(_arrays(tensors_of(state_dict)))


def _arrays(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, list[int], bytes | memoryview]]:
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        # As bytes, because numpy has no bfloat16 and a comparison of floats takes -0.0 and 0.0 for equal.
        content = value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b""
        yield name, str(value.dtype).removeprefix("torch."), list(value.shape), content


@dataclass(frozen=True)
class NamedTensors:
    """Contiguous tensors on the CPU, the content of one file."""

    tensors: Mapping[str, Tensor]

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        safetensors.torch.save_file(dict(self.tensors), path)

    def digest(self) -> str:
        """Return the `weights_digest`."""
        return weights_digest(self.tensors)


def torch_snapshot(facts: CheckpointFacts, weights: Mapping[str, Tensor], training: NamedTensors) -> Snapshot:
    """Make the snapshot of weights on the CPU and the file of `training_file`.

    Raises:
        TrainingError: a weight is not a number.
    """
    _check_weights(weights, facts.step)
    model = NamedTensors(weights)
    return Snapshot(facts, {MODEL: model, TRAINING: training}, model.digest)


def _check_weights(weights: Mapping[str, Tensor], step: int) -> None:
    """Raise TrainingError if a weight after `step` steps is not a number."""
    numbers = {name: weight for name, weight in weights.items() if weight.is_floating_point()}
    # A sum finds one fastest; float8 has no sum. inf - inf is NaN, too, so suspects are checked again.
    total = sum(weight.sum().item() for weight in numbers.values() if weight.itemsize > 1)
    suspects = {name: weight for name, weight in numbers.items() if weight.itemsize == 1 or math.isnan(total)}
    bad = next((name for name, weight in suspects.items() if weight.isnan().any()), None)
    if bad is not None:
        raise not_a_number(f"the weight {bad} is not a number after step {step:,}")


def training_file(training: Mapping[str, Any], ranks: Tensor) -> NamedTensors:
    """Make the file of the training state.

    Args:
        training: optimizer, scheduler, gradient scaler and extra state, packed.
        ranks: each rank's random generators, uint8[ranks, n].
    """
    return NamedTensors({**training["tensors"], "tree": loadable(training["tree"]), "ranks": ranks.contiguous()})


def weights_of(files: Storage) -> dict[str, Tensor]:
    """Read the weights of a checkpoint, on the CPU."""
    return safetensors.torch.load(files.read_bytes(MODEL))


def training_of(files: Storage) -> dict[str, Any]:
    """Read optimizer, scheduler and scaler state, and `ranks`, each rank's random generators: uint8[ranks, n], on the CPU."""
    blocks = safetensors.torch.load(files.read_bytes(TRAINING))
    tree = torch.load(io.BytesIO(blocks["tree"].numpy().tobytes()), map_location="cpu", weights_only=True)
    return {**unpack(tree, blocks), "ranks": blocks["ranks"]}
