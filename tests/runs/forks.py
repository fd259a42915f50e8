"""Processes forked from one that has imported their libraries: workers and agents of embedded Rays, Prefect servers, trials."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests import ROOT

if TYPE_CHECKING:
    from penstock.flows.servers.prefect_server import ServerFiles

__all__ = [
    "Asked",
    "Forks",
    "be_agent",
    "be_prefect_server",
    "be_worker",
    "fork_agents",
    "fork_servers",
    "fork_trials",
    "fork_workers",
    "forks_asked_for_at",
]

Asked = tuple[Callable[[], None], Callable[..., object]]
"""What to be, and whom to tell: of `pid` when it is there, of `pid` and `code` when it has ended."""

_TRIAL = "a trial"
_STAND_IN = [sys.executable, "-I", "-S", str(ROOT / "tests" / "runs" / "forked_worker.py")]


class Forks:
    """Forks a process for each request.

    Args:
        sources: file descriptors, readable when there is a request or no more will come.
        take: from one of them: what is asked for, or None when no more will come. ConnectionError: who asked has gone.
    """

    def __init__(self, sources: Sequence[int], take: Callable[[int], Asked | None]) -> None:
        self._take = take
        self._waiting = selectors.DefaultSelector()
        for source in sources:
            self._waiting.register(source, selectors.EVENT_READ)
        self._children: dict[int, tuple[int, Callable[..., object]]] = {}

    def serve(self) -> Callable[[], None] | None:
        """Returns what to be, in a forked process; None when no more will come and all that were forked have been ended."""
        while True:
            for key, _ in self._waiting.select():
                if key.fd in self._children:
                    self._ended(key.fd)
                    continue
                try:
                    asked = self._take(key.fd)
                except ConnectionError:
                    continue
                if asked is None:
                    self._end()
                    return None
                if self._fork(asked[1]):
                    return asked[0]

    def _fork(self, tell: Callable[..., object]) -> bool:
        child = os.fork()
        if not child:
            self._waiting.close()
            for watch in self._children:
                os.close(watch)
            return True
        watch = os.pidfd_open(child)
        self._children[watch] = child, tell
        self._waiting.register(watch, selectors.EVENT_READ)
        tell(pid=child)
        return False

    def _ended(self, watch: int) -> None:
        child, tell = self._children.pop(watch)
        self._waiting.unregister(watch)
        os.close(watch)
        tell(pid=child, code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    def _end(self) -> None:
        for watch, (child, _) in list(self._children.items()):
            os.kill(child, signal.SIGKILL)
            self._ended(watch)


@functools.cache
def fork_workers(address: str) -> None:
    """Have the workers of the Ray that this process starts forked: they are asked for at `address`."""
    _replace("--python_worker_command=", sys.executable, address)


@functools.cache
def fork_agents(address: str) -> None:
    """Have the two agents of each node of that Ray forked: they are asked for at `address`."""
    for name in ("dashboard", "runtime_env"):
        _replace(f"--{name}_agent_command=", f"{sys.executable} -u", address)


def _replace(flag: str, interpreter: str, address: str) -> None:
    """Have a raylet start, in place of that interpreter, what asks for a process at `address`."""
    from ray._private import services

    real = services.start_ray_process
    theirs, ours = f"{flag}{interpreter} ", f"{flag}{' '.join(_STAND_IN)} {address} "

    def start(command: list[str], *more: Any, **options: Any) -> Any:
        return real([word.replace(theirs, ours) if word.startswith(theirs) else word for word in command], *more, **options)

    services.start_ray_process = start


@functools.cache
def fork_servers(address: str) -> None:
    """Have the Prefect servers that this process starts forked: they are asked for at `address`."""
    from penstock.flows.servers import services

    def spawn(files: ServerFiles) -> subprocess.Popen[bytes]:
        command = [*_STAND_IN, address, str(files.home.parent)]
        with open(files.log, "wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    services._spawn_server = spawn


@functools.cache
def fork_trials(address: str) -> None:
    """Have the processes forked in which this one tries two batches: they are asked for at `address`, as workers are."""
    from penstock.training.frameworks import trial

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([*_STAND_IN, address, _TRIAL, *command], **options)

    trial.subprocess = SimpleNamespace(run=run)  # type: ignore[assignment]


def forks_asked_for_at(listener: socket.socket, be: Callable[[list[str], int], None], watch: int) -> Forks:
    """What forks the processes that are asked for at `listener`.

    A line of JSON and three descriptors ask for one; the answer is a line with its id and, in the end, one with its exit code.

    Args:
        be: what they are, given the words of their command line and the id of the process that asked.
        watch: descriptor of a process whose end ends them all.
    """

    def take(source: int) -> Asked | None:
        if source != listener.fileno():
            return None
        connection = listener.accept()[0]
        content, streams, _, _ = socket.recv_fds(connection, 1 << 16, 3)
        while not content.endswith(b"\n"):
            more = connection.recv(1 << 16)
            if not more:
                for stream in streams:
                    os.close(stream)
                connection.close()
                raise ConnectionError("who asked has gone before it was done")
            content += more

        def tell(*, pid: int, code: int | None = None) -> None:
            with contextlib.suppress(OSError):  # who asked may be gone
                connection.sendall(f"{pid if code is None else code}\n".encode())
            for stream in streams if code is None else ():
                os.close(stream)
            if code is not None:
                connection.close()

        def become() -> None:
            listener.close()
            os.close(watch)
            request = json.loads(content)
            _stand_in_for(request, streams, connection)
            be(request["words"], request["pid"])

        return become, tell

    return Forks([listener.fileno(), watch], take)


def _stand_in_for(request: dict[str, Any], streams: Sequence[int], connection: socket.socket) -> None:
    """Take the folder, streams and environment that are asked for, and end when the process that asked does."""
    os.setsid()
    os.chdir(request["folder"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()


def be_worker(words: list[str], _: int) -> None:
    """Be the worker that Ray asked for, or the process of a trial.

    Ray reads a worker's settings from the environment when it is imported: do not import it before the fork.
    """
    given = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # Ray's variable for OpenMP comes too late in a process that has loaded it
    if words[0] == _TRIAL:
        sys.path[:] = [*given, *(entry for entry in sys.path if entry not in given)]
        exec(words[-1])
        return
    # The first word is Ray's program that sets the environment up and becomes the second.
    _, program, *words = words
    context = next((json.loads(word.split("=", 1)[1]) for word in words if word.startswith("--serialized-runtime-env")), {})
    os.environ.update(context.get("env_vars", {}))
    sys.path[:] = [os.path.dirname(program), *given, *sys.path[1:]]
    sys.argv = [program, *(word for word in words if not word.startswith(("--serialized-runtime-env", "--language=")))]
    runpy.run_path(program, run_name="__main__")


def be_agent(words: list[str], stand_in: int) -> None:
    """Be an agent of a Ray node. It watches whether its raylet lives, which has `stand_in` for a child."""
    from ray._private import process_watcher

    process_watcher.psutil = SimpleNamespace(Process=functools.partial(process_watcher.psutil.Process, stand_in))
    sys.path[0] = os.path.dirname(words[0])
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def be_prefect_server(words: list[str], _: int) -> None:
    """Be the embedded Prefect server of a state folder. Prefect, which is imported, reads its settings again."""
    from prefect.context import refresh_global_settings_context

    from penstock.flows.servers import prefect_server

    configure = prefect_server._configure

    def configure_again(files: ServerFiles, port: int) -> None:
        configure(files, port)
        refresh_global_settings_context()

    prefect_server._configure = configure_again
    sys.argv = [str(prefect_server.__file__), *words]
    prefect_server.main()


def _end_with(connection: socket.socket) -> None:
    while connection.recv(1):
        pass
    os._exit(1)
