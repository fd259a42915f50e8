"""Which process is meant, when its number may be another's by now: after a reboot, in a container, on another machine?"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import psutil

from penstock.config import Section

__all__ = ["ProcessIdentity", "boot_id"]


class ProcessIdentity(Section):
    """One process, told apart from every other."""

    host: str
    """Its host name, for people: two containers may have the same."""
    machine: str
    """The boot of the machine and the process namespace in which `pid` means something."""
    pid: int
    started: float
    """When it started, which tells it from a later process of the same pid; see `_started`."""

    @classmethod
    def current(cls) -> ProcessIdentity:
        """This process."""
        return cls(host=socket.gethostname(), machine=_machine(), pid=os.getpid(), started=_started(os.getpid()))

    @property
    def is_alive(self) -> bool | None:
        """Whether it lives; None if it is on another machine, where one cannot look."""
        if (self.host, self.machine) != (socket.gethostname(), _machine()):
            return None
        try:
            return _started(self.pid) == self.started and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def _started(pid: int) -> float:
    """When a process started: on Linux in clock ticks since the boot, which stay when the system's clock is set.

    Raises:
        psutil.NoSuchProcess: there is none.
    """
    stat = Path(f"/proc/{pid}/stat")
    try:
        # The name, in brackets, may hold spaces and brackets; the start is field 22 and the name field 2.
        return float(stat.read_text(errors="replace").rpartition(")")[2].split()[19])
    except OSError:
        return psutil.Process(pid).create_time()  # no /proc, or no such process


def boot_id() -> str:
    """Another after each start of the machine; empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _machine() -> str:
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{boot_id() or f'{psutil.boot_time():.0f}'} {namespace}".strip()
