"""What lies in the files of a checkpoint, and how does it become tensors again?

Both are safetensors files. That of the weights holds them by name; that of the training state two blocks of bytes as
training/packed.py makes them, `training` and `ranks` (one row for each rank), and as `trees` what it keeps beside the blocks.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from training.checkpoint import MODEL, TRAINING, Checkpoint
from training.packed import unpack
from training.weights import weights_digest

__all__ = ["NamedTensors", "training_file", "training_of", "weights_of"]

_TRAINING_BEFORE, _SAFETENSORS_SINCE, _PACKED_SINCE = "training.pt", 4, 3


@dataclass(frozen=True)
class NamedTensors:
    """Contiguous tensors on the CPU that go into one file: `training.checkpoint.Tensors`."""

    tensors: Mapping[str, Tensor]

    @property
    def size_bytes(self) -> int:
        """Of all together."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        safetensors.torch.save_file(dict(self.tensors), path)

    def digest(self) -> str:
        """As `weights_digest`."""
        return weights_digest(self.tensors)


def training_file(training: Mapping[str, Any], ranks: Mapping[str, Any]) -> NamedTensors:
    """What the training state's file holds.

    Args:
        training: optimizer, scheduler, gradient scaler and extra state, packed.
        ranks: random generators, packed: `tree` and `layout`, which all ranks share, and the `bytes` of each, uint8[ranks, n].
    """
    parts = {"training": training, "ranks": ranks}
    trees = io.BytesIO()
    torch.save({part: {"tree": packed["tree"], "layout": packed["layout"]} for part, packed in parts.items()}, trees)
    blocks = {part: packed["bytes"].contiguous() for part, packed in parts.items()}
    return NamedTensors({**blocks, "trees": torch.frombuffer(trees.getbuffer(), dtype=torch.uint8)})


def weights_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The weights, on the CPU."""
    return safetensors.torch.load(checkpoint.storage.read_bytes(MODEL))


def training_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Optimizer, scheduler and scaler state, and as `ranks` each rank's random generators, on the CPU."""
    if checkpoint.manifest.version < _SAFETENSORS_SINCE:
        content = _loaded(checkpoint.storage.read_bytes(_TRAINING_BEFORE))
        if checkpoint.manifest.version < _PACKED_SINCE:
            return content
        training, ranks = content["training"], content["ranks"]
    else:
        blocks = safetensors.torch.load(checkpoint.storage.read_bytes(TRAINING))
        trees = _loaded(blocks["trees"].numpy().tobytes())
        training, ranks = ({**trees[part], "bytes": blocks[part]} for part in ("training", "ranks"))
    return {**unpack(training), "ranks": [unpack({**ranks, "bytes": rank}) for rank in ranks["bytes"]]}


def _loaded(content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return found
