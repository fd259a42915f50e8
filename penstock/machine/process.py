"""Which process is meant, when its number may be another's by now: after a reboot, in a container, on another machine?"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import psutil

from penstock.config import Section

__all__ = ["ProcessIdentity"]


_CLOCK_STEP_S = 2.0
"""The start time is computed from the clock, which may have been set since."""


class ProcessIdentity(Section):
    """One process, told apart from every other."""

    host: str
    """Its host name, for people: two containers may have the same."""
    machine: str
    """The boot of the machine and the process namespace in which `pid` means something."""
    pid: int
    started: float
    """Start time, seconds since the epoch: a reused pid is another process."""

    @classmethod
    def current(cls) -> ProcessIdentity:
        """This process."""
        return cls(host=socket.gethostname(), machine=_machine(), pid=os.getpid(), started=psutil.Process().create_time())

    @property
    def is_alive(self) -> bool | None:
        """Whether it lives; None if it is on another machine, where one cannot look."""
        if (self.host, self.machine) != (socket.gethostname(), _machine()):
            return None
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < _CLOCK_STEP_S
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def _machine() -> str:
    boot, namespace = f"{psutil.boot_time():.0f}", ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{boot} {namespace}".strip()
