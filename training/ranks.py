"""How do the ranks of one worker group talk to each other?

A thin view of torch.distributed that also stands for one lone process.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Group", "is_lost_peer"]


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed, which is how the loss of another rank shows on this one.

    Torch has a class of its own for some backends; gloo raises a RuntimeError, so the place decides.
    """
    if not (isinstance(error, RuntimeError) and dist.is_initialized()):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(str(Path(dist.__file__).parent))


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

    def gather(self, own: Tensor) -> Callable[[], Tensor]:
        """Begin to gather every rank's vector, of one length and dtype, and return at once.

        Returns:
            A function that waits and gives them on the CPU, stacked in rank order. Any thread may call it. It raises
            what torch.distributed raises when a rank is gone.
        """
        if self.world_size == 1:
            return lambda: own.cpu()[None]
        own = own.to(self.device)
        everyone = own.new_empty(self.world_size, len(own))
        work = dist.all_gather(list(everyone), own, async_op=True)

        def gathered() -> Tensor:
            work.wait()
            return everyone.cpu()

        return gathered

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
