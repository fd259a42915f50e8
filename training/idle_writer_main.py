"""What does the process do that writes checkpoints beside training? What a thread would do, when a core has nothing else to do.

It does not load torch. Its other end is `penstock.training.idle_writer`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import TensorSpec, serialize_file

from penstock.digest import arrays_digest
from penstock.errors import PenstockError
from penstock.storage import Storage
from penstock.training.checkpoint import CheckpointFacts, CheckpointStore, Snapshot
from penstock.training.commit import commit
from penstock.training.journal import JournalWriter, Point
from penstock.training.spec import CheckpointSpec

__all__ = ["Place", "Request", "Target", "main"]


class Target(NamedTuple):
    """Where everything goes."""

    storage: Storage
    spec: CheckpointSpec
    attempt: int


class Place(NamedTuple):
    """A tensor in shared memory."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    size_bytes: int


class Request(NamedTuple):
    """One checkpoint. The answer to it is the checkpoint's name, or the error."""

    facts: CheckpointFacts
    model: Mapping[str, Place]
    training: Mapping[str, Place] | None
    mark: str
    points: list[Point]


@dataclass(frozen=True)
class _SharedTensors:
    """`penstock.training.checkpoint.Tensors` in memory that another process fills."""

    memory: mmap.mmap
    places: Mapping[str, Place]

    @property
    def size_bytes(self) -> int:
        return sum(place.size_bytes for place in self.places.values())

    def save(self, path: Path) -> None:
        memory = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        specs = {
            name: TensorSpec(dtype=dtype, shape=list(shape), data_ptr=memory + first, data_len=size_bytes)
            for name, (dtype, shape, first, size_bytes) in self.places.items()
        }
        serialize_file(specs, path)

    def digest(self) -> str:
        return arrays_digest(self._arrays())

    def _arrays(self) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        memory = memoryview(self.memory)
        for name, (dtype, shape, first, size_bytes) in sorted(self.places.items()):
            yield name, dtype, shape, memory[first : first + size_bytes]


def main(connection_fd: int, memory_fd: int, parent: int) -> None:
    """Answer requests of the process `parent` until it closes its end of the connection.

    The first message is the Target. A request comes as where it lies, pickled, in the shared memory: it may be larger than what
    a connection takes at once. That memory has no name by which others could open it.
    """
    _live_with(parent)
    connection: Connection[Any, Any] = Connection(connection_fd)
    try:
        storage, spec, attempt = connection.recv()
    except EOFError:
        return
    store, journal = CheckpointStore(storage, spec.keep, spec.best), JournalWriter(storage, attempt)
    memory: mmap.mmap | None = None
    while True:
        try:
            first, size_bytes = connection.recv()
        except EOFError:
            return
        if memory is None or len(memory) < os.fstat(memory_fd).st_size:
            memory = mmap.mmap(memory_fd, 0)
        request: Request = pickle.loads(memory[first : first + size_bytes])
        model = _SharedTensors(memory, request.model)
        training = _SharedTensors(memory, request.training) if request.training is not None else None
        snapshot = Snapshot(request.facts, model, training, request.mark)
        try:
            answer: str | PenstockError = commit(store, journal, snapshot, request.points)
        except PenstockError as error:
            answer = error
        connection.send(answer)


def _live_with(parent: int) -> None:
    """End with the process that asks, however that ends; and not before: it saves after a signal that all get."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()
