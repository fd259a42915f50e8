"""What lies in the files of a torch checkpoint, and how does it become tensors again?

Both are safetensors files. That of the weights holds them by name. That of the training state holds blocks of bytes: `training`
and `tree`, what training/checkpoint/packed.py makes of it, and `ranks`, the random generators as training/rng.py captures them.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from penstock.storage import Storage
from penstock.training.checkpoint.manifest import MODEL, CheckpointFacts
from penstock.training.checkpoint.packed import unpack
from penstock.training.checkpoint.store import Snapshot
from penstock.training.checkpoint.weights import NamedTensors
from penstock.training.not_a_number import check_weights

__all__ = ["TRAINING", "torch_snapshot", "training_file", "training_of", "weights_of"]


TRAINING = "training.safetensors"
"""Optimizer, scheduler, gradient scaler, extra state of modules, every rank's random generators."""


def torch_snapshot(
    facts: CheckpointFacts, weights: Mapping[str, Tensor], training: NamedTensors, *, refuses_nan: bool = False
) -> Snapshot:
    """What a checkpoint is written from: weights on the CPU, and what `training_file` makes.

    Raises:
        TrainingError: with `refuses_nan`, a weight is not a number.
    """
    if refuses_nan:
        check_weights(weights, facts.step)
    model = NamedTensors(weights)
    return Snapshot(facts, {MODEL: model, TRAINING: training}, model.digest)


def training_file(training: Mapping[str, Any], ranks: Tensor) -> NamedTensors:
    """What the training state's file holds.

    Args:
        training: optimizer, scheduler, gradient scaler and extra state, packed.
        ranks: each rank's random generators, uint8[ranks, n].
    """
    tree = _saved(pickle.dumps({name: training[name] for name in ("tree", "layout")}))
    return NamedTensors({"training": training["bytes"], "tree": tree, "ranks": ranks.contiguous()})


def weights_of(files: Storage) -> dict[str, Tensor]:
    """The weights of a checkpoint's files, on the CPU."""
    return safetensors.torch.load(files.read_bytes(MODEL))


def training_of(files: Storage) -> dict[str, Any]:
    """Optimizer, scheduler and scaler state, and as `ranks` each rank's random generators, uint8[ranks, n], on the CPU."""
    blocks = safetensors.torch.load(files.read_bytes(TRAINING))
    tree = torch.load(io.BytesIO(blocks["tree"].numpy().tobytes()), map_location="cpu", weights_only=True)
    return {**unpack({**tree, "bytes": blocks["training"]}), "ranks": blocks["ranks"]}


@functools.lru_cache(maxsize=1)
def _saved(pickled: bytes) -> Tensor:
    """What torch.save makes of it: often the same as before, and it takes fifty times as long.

    Args:
        pickled: by this process, a moment ago, as a key for the cache. Nothing that was stored is ever unpickled.
    """
    stream = io.BytesIO()
    torch.save(pickle.loads(pickled), stream)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)
