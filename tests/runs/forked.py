"""A `penstock` process forked from one that has imported its libraries: a whole command but for ten CPU seconds of imports.

For drills, which start many. So are the workers of the Ray that it starts, and its Prefect server, see `forks.py`. What is the
same for every command of an environment is looked up once, too. The tests that start `python -m penstock` show what both do.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests import ROOT
from tests.drills import project
from tests.runs.forks import Asked, Forks, be_prefect_server, be_worker, fork_servers, fork_workers, forks_asked_for_at

__all__ = ["Command", "fork_workers_from_here"]


def _listening(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    return listener


class _Server:
    """The process that forks, and a thread that hears from it which process has ended how."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-forks-")
        self.workers = f"{self._folder.name}/workers"
        with _listening(self.workers) as workers, _listening(f"{self._folder.name}/prefect") as prefect:
            listeners = [workers.fileno(), prefect.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *map(str, listeners)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                pass_fds=listeners,
            )
        self._begun: queue.Queue[int] = queue.Queue()
        self.ended: dict[int, int] = {}
        self.gone = False
        self.news = threading.Condition()
        threading.Thread(target=self._hear, daemon=True).start()
        atexit.register(self._close)

    def fork(self, request: dict[str, Any]) -> int:
        """Begin a command; returns the process's id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        pid = self._begun.get(timeout=600)
        assert pid, "the process that forks has ended"
        return pid

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if "code" not in told:
                self._begun.put(told["pid"])
                continue
            with self.news:
                self.ended[told["pid"]] = told["code"]
                self.news.notify_all()
        self._begun.put(0)
        with self.news:
            self.gone = True
            self.news.notify_all()


@functools.cache
def _server() -> _Server:
    return _Server()


def fork_workers_from_here() -> None:
    """Have the workers of the Rays that this process starts forked."""
    fork_workers(_server().workers)


class _Forked:
    """What `subprocess.Popen` is for a child, for one of the server's."""

    def __init__(self, words: tuple[str, ...], environment: Mapping[str, str], said: Path) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._out = Path(self._folder.name) / "stdout"
        self._out.touch()  # a process that ends before it opens it has said nothing, and its exit code tells
        self._server = _server()
        request = {"words": words, "environment": dict(environment), "folder": os.getcwd(), "out": str(self._out)}
        self.pid = self._server.fork({**request, "said": str(said)})

    @property
    def returncode(self) -> int | None:
        return self._server.ended.get(self.pid)

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        with self._server.news:
            if not self._server.news.wait_for(lambda: self.returncode is not None or self._server.gone, timeout):
                raise subprocess.TimeoutExpired("penstock", timeout or 0.0)
        return self._server.ended[self.pid]

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self._out.read_text(), None


def _end(process: _Forked) -> None:
    process.kill()
    process.wait()


class Command(project.Command):
    """One `penstock` process that is forked: see `tests.drills.project.Command`."""

    def __init__(self, *words: str, environment: Mapping[str, str] | None = None) -> None:
        self.words = words
        self._said = tempfile.NamedTemporaryFile("w+")  # type: ignore[assignment]  # noqa: SIM115
        self.process = _Forked(words, {**os.environ, **(environment or {})}, Path(self._said.name))  # type: ignore[assignment]
        weakref.finalize(self, _end, self.process)  # type: ignore[arg-type]


def _commands(workers: str, prefect: str) -> Forks:
    """Processes for the lines of stdin. What becomes of them is told on stdout."""
    tell = os.fdopen(os.dup(1), "w", buffering=1)

    def take(_: int) -> Asked | None:
        line = sys.stdin.readline()
        if not line:  # the tests are over, or were killed
            return None
        return functools.partial(_become, json.loads(line), workers, prefect), lambda **told: tell.write(
            json.dumps(told) + "\n"
        )

    return Forks([0], take)


def _become(request: dict[str, Any], workers: str, prefect: str) -> None:
    """Be the process that `python -m penstock WORDS` would have been, but for the workers and the server that it starts."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, name in enumerate((os.devnull, request["out"], request["said"])):
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    path = [entry for entry in request["environment"].get("PYTHONPATH", "").split(os.pathsep) if entry not in sys.path]
    sys.path[1:1] = filter(None, path)
    sys.argv = [str(ROOT / "penstock" / "__main__.py"), *request["words"]]
    fork_workers(workers)
    fork_servers(prefect)

    _look_at_prefects_settings_again()

    from penstock.flows.cli import main

    main()


def _look_at_prefects_settings_again() -> None:
    """Prefect, which is imported, has read those of the process that forks, and set its log lines up by them."""
    from prefect.context import refresh_global_settings_context
    from prefect.logging.configuration import setup_logging
    from prefect.logging.handlers import PrefectConsoleHandler

    from penstock.flows.servers import services

    def reload() -> None:
        refresh_global_settings_context()
        levels = setup_logging(incremental=True)["handlers"]  # without, it would close handlers, and absl's closes stderr
        for handler in logging.getLogger().handlers:
            if isinstance(handler, PrefectConsoleHandler):
                handler.setLevel(levels["console"]["level"])

    reload()
    services._reload_prefect = reload


def _main(workers: socket.socket, prefect: socket.socket) -> None:
    addresses = [listener.getsockname() for listener in (workers, prefect)]
    if not os.fork():
        workers.close()
        for name in _OF_PREFECT_SERVERS:
            importlib.import_module(name)
        forks = forks_asked_for_at(prefect, be_prefect_server)
    else:
        prefect.close()
        forks = _penstocks(workers, *addresses)
    gc.freeze()
    assert threading.active_count() == 1, "only what is forked whole"
    be = forks.serve()
    if be is not None:
        be()


def _penstocks(listener: socket.socket, workers: str, prefect: str) -> Forks:
    """Of workers or, in the process that goes on, of commands."""
    from penstock.training.evaluation.defined import metric_library
    from penstock.training.tracking.registry import TRACKERS

    for name in _OF_WORKERS:
        importlib.import_module(name)
    metric_library()
    gc.freeze()
    if not os.fork():
        return forks_asked_for_at(listener, be_worker)
    listener.close()
    for name in _OF_COMMANDS:
        importlib.import_module(name)
    TRACKERS.get("mlflow").load()
    _find_out_what_is_the_same_for_all()
    return _commands(workers, prefect)


def _find_out_what_is_the_same_for_all() -> None:
    """What commands look up of the environment and keep: its packages, our own code, fonts."""
    from mlflow.utils.requirements_utils import _init_packages_to_modules_map

    from penstock.flows.run.environment import describe_environment
    from penstock.training.evaluation.figures import confusion_figure, figure_png
    from penstock.training.registry.needed_code import needed_modules

    describe_environment()
    _init_packages_to_modules_map()
    figure_png(confusion_figure(np.eye(2, dtype=np.int64), "ab"))
    needed_modules([f"penstock.training.{name}" for name in ("registry.serving", "frameworks.torch.loading")])


_OF_WORKERS = (
    "torch._dynamo",  # which an optimizer imports
    "pandas",
    "penstock.ingest.materialize.build",
    "penstock.ingest.preprocess.fit",
    "penstock.training.loop.loop",
)
_OF_COMMANDS = (
    "penstock.flows.cli",
    "penstock.flows.verbs.run",
    "penstock.flows.pipeline",
    "penstock.training.on_ray.train_group",
    "penstock.training.registry.mlflow_registry",
    "aiohttp",
    "graphviz",
    "mlflow.pyfunc",
    "prefect.blocks.notifications",
    "ray.dag",
    "sqlalchemy.dialects.sqlite",
    "alembic.command",
)
_OF_PREFECT_SERVERS = (
    "alembic.command",
    "penstock.flows.servers.prefect_server",
    "prefect.server.api.server",
    "prefect.server.database.alembic_commands",
    "sqlalchemy.dialects.sqlite.aiosqlite",
    "uvicorn",
)


if __name__ == "__main__":
    _main(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))
