"""How do the ranks of one worker group talk to each other?

A thin view of torch.distributed that also stands for one lone process.
"""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Group", "Letters"]


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

    def beside_first(self) -> int | None:
        """The lowest other rank on rank 0's machine; None where rank 0 is alone there. A collective."""
        if self.world_size == 1:
            return None
        hosts: list[Any] = [None] * self.world_size
        dist.all_gather_object(hosts, _machine())
        return next((rank for rank, host in enumerate(hosts) if rank > 0 and host == hosts[0]), None)

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


def _machine() -> str:
    """Which machine this is: hosts that were cloned may share a name, but not the kernel that runs."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else uuid.getnode()}"


class Letters:
    """Carries short texts from one rank to rank 0, beside what training sends: for threads in the background.

    Making it is a collective.

    Args:
        sender: the other rank.
    """

    def __init__(self, sender: int) -> None:
        self._sender = sender
        # A rank that is lost closes its connection; what takes so long is a slow storage.
        self._pair: Any = dist.new_group([0, sender], timeout=timedelta(days=1), backend="gloo")

    def send(self, text: str) -> None:
        """Send a text to rank 0, and wait until it is taken. Raises RuntimeError if rank 0 is gone."""
        letter = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        for part in (torch.tensor([len(letter)]), letter):
            dist.send(part, dst=0, group=self._pair)

    def receive(self) -> str:
        """Wait for the sender's next text. Raises RuntimeError if it is gone."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, src=self._sender, group=self._pair)
        letter = bytearray(int(size))
        dist.recv(torch.frombuffer(letter, dtype=torch.uint8), src=self._sender, group=self._pair)
        return letter.decode()

    def close(self) -> None:
        """No more is sent or received; whoever still waits for it gets an error."""
        with contextlib.suppress(ValueError):  # the ranks' own group has ended, and this one with it
            dist.destroy_process_group(self._pair)
        self._pair = None
