"""How do the ranks of one worker group talk to each other?

A thin view of torch.distributed that also stands for one lone process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Group"]


@dataclass(frozen=True)
class Group:
    """The ranks that train together, seen from one of them.

    Every method but the properties is a collective: all ranks call it.
    """

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def current(cls, device: torch.device) -> Group:
        """The process group of this process, or a group of one where none was set up."""
        if not dist.is_initialized():
            return cls(0, 1, device)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that writes checkpoints and talks to the driver."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Add up equally long lists over the ranks, in float64."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over the ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Every rank's small tensors, in rank order, on every rank's CPU. Names, shapes and dtypes are the same on all."""
        own = torch.cat([tensor.cpu().reshape(-1).view(torch.uint8) for tensor in tensors.values()]).to(self.device)
        everyone = [own]
        if self.world_size > 1:
            everyone = [torch.empty_like(own) for _ in range(self.world_size)]
            dist.all_gather(everyone, own)
        return [_cut_apart(packed.cpu(), tensors) for packed in everyone]

    def from_first(self, value: Any) -> Any:
        """Rank 0's small picklable value, on every rank; the other ranks' argument is ignored."""
        if self.world_size == 1:
            return value
        box = [value if self.is_first else None]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def copy_first(self, tensors: list[Tensor]) -> None:
        """Overwrite the tensors with rank 0's."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)


def _cut_apart(packed: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bytes, one tensor's after the other's, as tensors of the dtypes and shapes of `like`."""
    pieces = packed.split([tensor.nbytes for tensor in like.values()])
    # Copied, because a piece may begin where no number of its dtype may.
    return {
        name: piece.clone().view(tensor.dtype).view(tensor.shape)
        for (name, tensor), piece in zip(like.items(), pieces, strict=True)
    }
