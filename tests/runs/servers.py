"""How does a test get the servers an operator would run? From the scripts of `deployments/servers/`, on free ports."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import psutil

from tests import ROOT

__all__ = ["ROOT", "eventually", "free_port", "free_ports", "script_environment", "serving"]

READY_S = 300
T = TypeVar("T")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 that nobody listens on now.

    They lie below those that Linux gives to everybody who asks for any port (32768 and above), as one of those might be taken
    when the server starts, or starts again; and above those of Ray's workers.
    """
    with contextlib.ExitStack() as held:
        found: list[int] = []
        for port in random.SystemRandom().sample(range(20_000, 32_768), 1000):
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("found no free port between 20000 and 32767")


def script_environment(state: Path) -> dict[str, str]:
    """The environment of a server script: this interpreter's programs first, state in `state`, penstock importable."""
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PENSTOCK_SERVERS": str(state),
        "PREFECT_HOME": str(state / "prefect"),
    }


@contextlib.contextmanager
def serving(
    script: str, *words: str, environment: Mapping[str, str], log: Path, url: str = "", folder: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script of `deployments/servers/` in `folder` for the block, from when `url` answers. All it started ends."""
    command = [str(ROOT / "deployments" / "servers" / script), *words]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        if url:
            eventually(lambda: _answers(process, url, log), READY_S, f"{script} at {url}")
        yield process
    finally:
        _end(process)


def eventually(look: Callable[[], T], within_s: float, what: str, every_s: float = 0.5) -> T:
    """Look again and again until the answer is true, and return it; AssertionError after `within_s` seconds on an idle machine.

    A busy one was four times slower.
    """
    deadline = time.monotonic() + 4 * within_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what}: not within {4 * within_s:g} s"
        time.sleep(every_s)  # what is waited for is another program's doing, which tells nobody: it can only be looked at
    return found


def _answers(process: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    assert process.poll() is None, f"exit code {process.returncode}: {log.read_text(errors='replace')[-3000:]}"
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, as a service manager does; after a while SIGKILL, to what it left behind as well."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for member in family:
        # psutil compares start times, so a number that the system gave away again is left alone.
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
