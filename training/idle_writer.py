"""How are checkpoints written without taking a core from training? By a process that runs only where a core is free.

Where ranks train on the CPU they wait for each other, a little in every step: there the writing fits in. A thread of low
priority would not do, as whoever holds the interpreter's lock keeps the training thread waiting.

Whatever becomes of the process, nothing is lost with it: the thread that waits for it writes the checkpoint then.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from multiprocessing import Pipe

import psutil
import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.own_code import IMPORT_ROOT
from penstock.storage import Storage
from penstock.training.checkpoint import Snapshot
from penstock.training.idle_writer_main import Place, Request, Target
from penstock.training.journal import Point
from penstock.training.snapshot_memory import SnapshotMemory
from penstock.training.state_files import NamedTensors

__all__ = ["IdleWriter", "IdleWriterGoneError"]

_DEFAULT_PRIORITY = 4
_LEAST_SHARE = 0.05
_WAITS_FOR_A_CORE = (psutil.STATUS_RUNNING, psutil.STATUS_STOPPED)


class IdleWriterGoneError(Exception):
    """The process is gone. The text is what a user should read of it; there is none if others needed all cores."""


class IdleWriter:
    """A process of the lowest priority that commits checkpoints.

    It ends with the thread that makes this, which must also close it. See `is_of_use`.

    Args:
        target: where checkpoints go.
        patience_s: how often a late process is looked at; it is given up when it has hardly run between two looks.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, target: Target, patience_s: float = 3.0) -> None:
        self.memory = SnapshotMemory()
        self._patience_s = patience_s
        self._connection, theirs = Pipe()
        root = str(IMPORT_ROOT)
        with theirs:
            arguments = theirs.fileno(), self.memory.fd, os.getpid()
            code = (
                f"import sys; sys.path.append({root!r}); from penstock.training.idle_writer_main import main; main{arguments}"
            )
            try:
                self._process = psutil.Popen(
                    [sys.executable, "-P", "-c", code], pass_fds=arguments[:2], stdin=subprocess.DEVNULL, process_group=0
                )
            except OSError:
                self._connection.close()
                self.memory.close()
                raise
            self._connection.send(target)  # while the other end is open here, too, so it cannot fail
        with contextlib.suppress(OSError, psutil.Error):  # a container may forbid it, and the process may have ended
            os.sched_setscheduler(self._process.pid, os.SCHED_IDLE, os.sched_param(0))
            # Its writes would be idle, too: behind whoever else wants the disk.
            self._process.ionice(psutil.IOPRIO_CLASS_BE, _DEFAULT_PRIORITY)

    @staticmethod
    def is_of_use(device: torch.device, storage: Storage) -> bool:
        """Whether training takes the cores that a checkpoint is written with, to a disk of this machine, on Linux."""
        return device.type == "cpu" and storage.is_local and sys.platform == "linux" and hasattr(os, "memfd_create")

    def write(self, snapshot: Snapshot[NamedTensors], points: list[Point]) -> str:
        """As `penstock.training.commit.commit`.

        Raises:
            CheckpointError: the storage refuses.
            IdleWriterGoneError: the process is gone, and the checkpoint may be there or not.
        """
        model = self._places(snapshot.model)
        training = self._places(snapshot.training) if snapshot.training is not None else None
        request = bytearray(pickle.dumps(Request(snapshot.facts, model, training, snapshot.mark, points)))
        where = self.memory.place(torch.frombuffer(request, dtype=torch.uint8)), len(request)
        try:
            self._connection.send(where)
            self._wait()
            answer: str | PenstockError = self._connection.recv()
        except (EOFError, OSError, psutil.Error) as error:
            what = f"the process that writes checkpoints was lost ({self._kill()}): training writes them itself now"
            raise IdleWriterGoneError(what) from error
        if isinstance(answer, PenstockError):
            raise answer
        return answer

    def close(self) -> None:
        """End it, when nothing is being written."""
        self._connection.close()
        self._kill()
        self.memory.close()

    def _wait(self) -> None:
        """Wait for the answer of a process that lives and runs, however slowly. What cannot may take for ever."""
        before_s = 0.0  # to ask costs as much as the request: it is asked when there is reason to
        while not self._connection.poll(self._patience_s):
            if self._process.poll() is not None:  # and somebody else, who was forked meanwhile, keeps the connection open
                raise EOFError
            ran_s, before_s = self._ran_s() - before_s, self._ran_s()
            if ran_s < _LEAST_SHARE * self._patience_s and self._process.status() in _WAITS_FOR_A_CORE:
                self._kill()
                raise IdleWriterGoneError

    def _ran_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def _kill(self) -> int:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.kill()
        return self._process.wait()

    def _places(self, tensors: NamedTensors) -> dict[str, Place]:
        return {name: self._place(tensor) for name, tensor in tensors.tensors.items()}

    def _place(self, tensor: Tensor) -> Place:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Place(dtype, tuple(tensor.shape), self.memory.place(tensor), tensor.nbytes)
