"""How do the ranks of one worker group synchronize? By torch.distributed; a single process works, too."""

from __future__ import annotations

import itertools
import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["POLL_S", "Group", "LostPeerError", "is_lost_peer"]

T = TypeVar("T")

POLL_S = (0.001, 0.2)
"""Shortest and longest pause between two checks for the other ranks."""


class LostPeerError(RuntimeError):
    """Another rank failed while this one waited for it: the error to report is that rank's."""


@dataclass(frozen=True)
class Group:
    """The ranks that train together, and the own rank among them.

    Every method but the properties, `post` and `posted` is a collective: all ranks call it.
    """

    rank: int
    world_size: int
    device: torch.device
    _meetings: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)
    _past: list[str] = field(default_factory=list, compare=False, repr=False)
    """Keys of meetings that this rank has left."""

    @classmethod
    def current(cls, device: torch.device) -> Group:
        """The process group of this process, or a group of one where none was set up."""
        if not dist.is_initialized():
            return cls(0, 1, device)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes checkpoints and sends events to the driver."""
        return self.rank == 0

    def together(self, work: Callable[[], T]) -> T:
        """Do work that may take any time, and return when all ranks have done theirs.

        Collectives time out to detect a stuck rank, but reading, hashing and writing of checkpoints may take longer: here
        ranks wait outside of any collective. Ray Train detects a rank that dies meanwhile.

        Raises:
            LostPeerError: the work of another rank failed.
        """
        if self.world_size == 1:
            return work()
        store = dist.distributed_c10d._get_default_store()
        meeting = f"penstock/{next(self._meetings)}"
        try:
            result = work()
        except BaseException:
            store.set(f"{meeting}/failed", str(self.rank))
            raise
        there, (wait_s, most_s) = store.add(meeting, 1), POLL_S
        while there < self.world_size:
            if store.check([f"{meeting}/failed"]):
                raise LostPeerError(f"rank {store.get(f'{meeting}/failed').decode()} failed while this one waited for it")
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, most_s)
            there = store.add(meeting, 0)
        for key in self._past:  # all ranks are here, so none reads them any more
            store.delete_key(key)
        self._past[:] = [meeting] if self.is_first else []
        return result

    def everyones(self, own: dict[str, str]) -> list[dict[str, str]]:
        """Gather a few facts of every rank, in rank order."""
        if self.world_size == 1:
            return [own]
        store, fact = dist.distributed_c10d._get_default_store(), f"penstock/fact-{next(self._meetings)}"
        self.together(lambda: store.set(f"{fact}/{self.rank}", json.dumps(own)))
        self._past.append(f"{fact}/{self.rank}")
        return [json.loads(store.get(f"{fact}/{rank}")) for rank in range(self.world_size)]

    def shared_name(self) -> str:
        """Return a new name, the same on every rank."""
        return f"penstock/name-{next(self._meetings)}"

    def post(self, name: str, count: int) -> None:
        """Publish a count for `posted` on other ranks. Not a collective."""
        if dist.is_initialized():
            dist.distributed_c10d._get_default_store().set(name, str(count))

    def posted(self, name: str) -> int:
        """Return the last count that a rank has published under a name; 0 if none has. Not a collective."""
        store = dist.distributed_c10d._get_default_store()
        return int(store.get(name)) if store.check([name]) else 0

    def sum(self, values: list[float]) -> list[float]:
        """Add up equally long lists over the ranks, in float64."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def gather(self, own: Tensor) -> Callable[[], Tensor]:
        """Start to gather every rank's vector, of one length and dtype.

        Returns:
            A function that waits and returns them on the CPU, stacked in rank order. Any thread may call it. It raises
            torch.distributed's errors if a rank is lost.
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
        """Return rank 0's small picklable value on every rank; other ranks' values are ignored."""
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


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective, or a wait for another rank, failed because that rank was lost.

    Some backends raise a class of torch. Gloo raises a RuntimeError: the innermost frame decides, or in a backward pass, which
    has no Python frames, the file that gloo names.
    """
    if isinstance(error, LostPeerError):
        return True
    if type(error).__module__.startswith("tensorflow."):  # of its own collectives
        return type(error).__name__ in ("AbortedError", "CancelledError", "UnavailableError")
    if not (isinstance(error, RuntimeError) and dist.is_initialized()):
        return False
    if isinstance(error, dist.DistError) or "/gloo/" in str(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(str(Path(dist.__file__).parent))
