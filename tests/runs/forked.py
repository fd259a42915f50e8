"""A `penstock` process forked from one that has imported its libraries: a whole command but for ten CPU seconds of imports.

For tests that start many. So are the workers and agents of the Ray that it starts, its Prefect server, and the process in which
`check` tries two batches, see `forks.py`.
What is the same for every command of an environment is looked up once, too. The tests that start `python -m penstock` show what
both do.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import json
import logging
import os
import pickle
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path

from tests import ROOT
from tests.drills import project
from tests.runs.forks import (
    be_agent,
    be_prefect_server,
    be_worker,
    fork_agents,
    fork_servers,
    fork_trials,
    fork_workers,
    forks_asked_for_at,
)

__all__ = ["Command", "address_of_prefect_servers", "fork_rank", "fork_trials_from_here", "fork_workers_from_here"]


@functools.cache
def _forking() -> list[str]:
    """Where commands, workers, agents and Prefect servers are asked for.

    The first process of a test run that asks starts what forks, for all of them; it ends with pytest, which has started them.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = Path(tempfile.gettempdir()) / f"penstock-forks-{run or uuid.uuid4().hex}"
    folder.mkdir(mode=0o700, exist_ok=True)
    addresses = [str(folder / name) for name in ("commands", "workers", "agents", "prefect")]
    with open(folder / "lock", "w") as lock, contextlib.ExitStack() as listening:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(addresses[0]):
            listeners = [listening.enter_context(socket.socket(socket.AF_UNIX)) for _ in addresses]
            for listener, address in zip(listeners, addresses, strict=True):
                listener.bind(address)
                listener.listen()
            pytest = os.pidfd_open(os.getppid() if run else os.getpid())
            numbers = [pytest, *(listener.fileno() for listener in listeners)]
            command = [sys.executable, "-m", __name__, *map(str, numbers)]
            subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=ROOT, pass_fds=numbers, start_new_session=True)
            os.close(pytest)
    return addresses


def fork_workers_from_here() -> None:
    """Have the workers and agents of the Rays that this process starts forked. It has Ray's settings of all tests."""
    _, workers, agents, _ = _forking()
    fork_workers(workers)
    fork_agents(agents)


def fork_trials_from_here() -> None:
    """Have the processes forked in which this one tries two batches."""
    fork_trials(_forking()[1])


def address_of_prefect_servers() -> str:
    """Return where a Prefect server is asked for, for `fork_servers` of another process."""
    return _forking()[3]


class _Forked:
    """What `subprocess.Popen` is for a child, for one that was asked for."""

    def __init__(self, words: tuple[str, ...], environment: Mapping[str, str], said: int, out: int | None = None) -> None:
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_forking()[0])
        self._answer = self._connection.makefile("rb", buffering=0)
        request = {"words": words, "pid": os.getpid(), "environment": dict(environment), "folder": os.getcwd()}
        with open(os.devnull, "rb") as nothing:
            streams = [nothing.fileno(), self._out.fileno() if out is None else out, said]
            socket.send_fds(self._connection, [json.dumps(request).encode() + b"\n"], streams)
        self.pid = self._number()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended this moment
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not connection.wait([self._connection], timeout):
                raise subprocess.TimeoutExpired("penstock", timeout or 0.0)
            self.returncode = self._number()
            self._answer.close()
            self._connection.close()
        return self.returncode

    def _number(self) -> int:
        line = self._answer.readline()
        assert line, "the process that forks has ended"
        return int(line)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        self._out.seek(0)
        return self._out.read(), None


def _end(process: _Forked) -> None:
    process.kill()
    process.wait()


class Command(project.Command):
    """One `penstock` process that is forked: see `tests.drills.project.Command`."""

    def __init__(self, *words: str, environment: Mapping[str, str] | None = None) -> None:
        self.words = words
        self._said = project.file_to_add_to()
        given = {**os.environ, **(environment or {})}
        self.process = _Forked(words, given, self._said.fileno())  # type: ignore[assignment]
        weakref.finalize(self, _end, self.process)  # type: ignore[arg-type]


_RANK = "a rank"


def fork_rank(work: Path) -> _Forked:
    """Fork a process that calls what lies pickled in the file `work`: a function and its arguments; it ends with the object."""
    return _Forked((_RANK, str(work), *sys.path), os.environ, said=2, out=1)


def _be_rank(work: str, *path: str) -> None:
    sys.path[:] = path
    function, *arguments = pickle.loads(Path(work).read_bytes())
    function(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # to take apart all that is imported takes longer than most ranks' work


def _be_command(words: list[str], _: int, *, addresses: Sequence[str], known: Mapping[str, str]) -> None:
    """Be the process that `python -m penstock WORDS` would have been, but for those that it starts.

    Args:
        addresses: where to ask for workers, agents and Prefect servers.
        known: the settings of Ray that the process had which has imported it for agents.
    """
    if words[0] == _RANK:
        _be_rank(*words[1:])
        return
    workers, agents, prefect = addresses
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in sys.path]
    sys.path[1:1] = filter(None, path)
    sys.argv = [str(ROOT / "penstock" / "__main__.py"), *words]
    fork_workers(workers)
    if _settings_of_ray() == known:
        fork_agents(agents)
    fork_servers(prefect)
    fork_trials(workers)

    _look_at_prefects_settings_again()

    from penstock.flows.cli import main

    main()


def _settings_of_ray() -> dict[str, str]:
    # Ray sets the last one itself when it is imported.
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_") and name != "RAY_CLIENT_MODE"}


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


def _main(pytest: int, listeners: Sequence[socket.socket]) -> None:
    commands, workers, agents, prefect = listeners
    if not os.fork():
        _import(_OF_PREFECT_SERVERS)
        _serve(prefect, listeners, be_prefect_server, pytest)
    elif not os.fork():
        ray = Path(importlib.import_module("ray").__file__ or "").parent
        for program in _OF_AGENTS:
            runpy.run_path(str(ray / program))
        _serve(agents, listeners, be_agent, pytest)
    else:
        _import(_OF_WORKERS)
        _load_metrics()
        gc.freeze()
        if not os.fork():
            _serve(workers, listeners, be_worker, pytest)
        else:
            _import(_OF_COMMANDS)
            _find_out_what_is_the_same_for_all()
            names = [listener.getsockname() for listener in (workers, agents, prefect)]
            be = functools.partial(_be_command, addresses=names, known=_settings_of_ray())
            _serve(commands, listeners, be, pytest)


def _serve(own: socket.socket, listeners: Sequence[socket.socket], be: Callable[[list[str], int], None], pytest: int) -> None:
    """Returns when no more processes will be asked for, and only in the one that forks."""
    for listener in listeners:
        if listener is not own:
            listener.close()
    gc.freeze()
    assert threading.active_count() == 1, "only what is forked whole"
    become = forks_asked_for_at(own, be, pytest).serve()
    if become is not None:
        become()
        sys.exit()


def _import(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)


def _load_metrics() -> None:
    from penstock.training.evaluation.defined import metric_library

    metric_library()


def _find_out_what_is_the_same_for_all() -> None:
    """Look up what commands keep of the environment: its packages and fonts."""
    from mlflow.utils.requirements_utils import _init_packages_to_modules_map

    from penstock.ingest.schema import FeedSchema
    from penstock.installed import describe_environment
    from penstock.training.exporters.figures import export
    from penstock.training.tracking.registry import TRACKERS

    TRACKERS.get("mlflow")
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401

    describe_environment()
    _init_packages_to_modules_map()
    export(FeedSchema(columns=()), {}, {"a": 1.0})


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
    "penstock.training.frameworks.trial",
    "penstock.training.on_ray.train_group",
    "ray.train.torch",
    "torchmetrics.classification",
    "pytest",  # which the module of a rank's test imports
    "tests.training.ranks",
    "penstock.training.registry.mlflow_registry",
    "aiohttp",
    "graphviz",
    "mlflow.pyfunc",
    "prefect.blocks.notifications",
    "ray.dag",
    "sqlalchemy.dialects.sqlite",
    "alembic.command",
)
_OF_AGENTS = ("dashboard/agent.py", "_private/runtime_env/agent/main.py")
_OF_PREFECT_SERVERS = (
    "alembic.command",
    "penstock.flows.servers.prefect_server",
    "prefect.server.api.server",
    "prefect.server.database.alembic_commands",
    "sqlalchemy.dialects.sqlite.aiosqlite",
    "uvicorn",
)


def _main_until_pytest_ends() -> None:
    pytest, *numbers = map(int, sys.argv[1:])
    listeners = [socket.socket(fileno=number) for number in numbers]
    folder, own = Path(listeners[0].getsockname()).parent, os.getpid()
    try:
        _main(pytest, listeners)
    finally:
        if os.getpid() == own:
            shutil.rmtree(folder)


if __name__ == "__main__":
    _main_until_pytest_ends()
