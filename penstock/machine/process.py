"""How is a process identified, and how does ours collect garbage? A pid alone may be reused, or be on another machine."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import socket
from pathlib import Path

import psutil

from penstock.config import Section

__all__ = ["ProcessIdentity", "boot_id", "collect_rarely"]

_NEW_OBJECTS = 500_000
"""Containers made and not yet freed before Python collects; its default is 700."""


class ProcessIdentity(Section):
    """Identifies one process among those of all machines and boots."""

    host: str
    """Its host name, for messages: two containers may have the same."""
    machine: str
    """The boot of the machine and the process namespace, in which `pid` is unique."""
    pid: int
    started: float
    """When it started, see `_started`: a later process may have the same pid."""

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Return the identity of this process."""
        return cls(host=socket.gethostname(), machine=_machine(), pid=os.getpid(), started=_started(os.getpid()))

    @property
    def is_alive(self) -> bool | None:
        """Whether it lives; None if it is on another machine."""
        if (self.host, self.machine) != (socket.gethostname(), _machine()):
            return None
        try:
            return _started(self.pid) == self.started and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def _started(pid: int) -> float:
    """Return when a process started: on Linux in clock ticks since the boot, which do not depend on the system's clock.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    stat = Path(f"/proc/{pid}/stat")
    try:
        # The name, in brackets, may hold spaces and brackets; the start is field 22 and the name field 2.
        return float(stat.read_text(errors="replace").rpartition(")")[2].split()[19])
    except OSError:
        return psutil.Process(pid).create_time()  # no /proc, or no such process


def boot_id() -> str:
    """Return an id that changes at each start of the machine; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _machine() -> str:
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{boot_id() or f'{psutil.boot_time():.0f}'} {namespace}".strip()


def collect_rarely() -> None:
    """Let this process collect garbage rarely, and end without a last collection.

    Torch, Ray, Prefect and MLflow are a million objects that stay. To search them again and again takes a quarter of the time
    of their import, and as long once more at the end: 2.5 s of the 6.5 s that `penstock run` works outside of the flow.
    """
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
    atexit.register(gc.freeze)
