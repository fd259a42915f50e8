"""How are two sets of weights compared?

By one digest over names, dtypes, shapes and bytes, the same for a model and for a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from penstock.digest import arrays_digest

__all__ = ["NamedTensors", "tensors_of", "weights_digest"]


def tensors_of(state_dict: Mapping[str, object]) -> dict[str, Tensor]:
    """The tensors of a state_dict, without the extra state some modules put beside them."""
    return {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}


def weights_digest(state_dict: Mapping[str, object]) -> str:
    """Digest a state_dict: 32 hex characters. Device and memory layout do not count, values count bit by bit."""
    return arrays_digest(_arrays(tensors_of(state_dict)))


def _arrays(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, list[int], bytes | memoryview]]:
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        # As bytes, because numpy knows no bfloat16 and a float comparison would call -0.0 and 0.0 equal.
        content = value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b""
        yield name, str(value.dtype).removeprefix("torch."), list(value.shape), content


@dataclass(frozen=True)
class NamedTensors:
    """Contiguous tensors on the CPU that go into one file."""

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
