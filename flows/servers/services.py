"""Where do Prefect, Ray and MLflow come from? From the environment when it names them, else embedded below the state directory.

PREFECT_API_URL      else a server process on 127.0.0.1, shared by this directory's penstock processes (prefect_server.py)
RAY_ADDRESS          else a cluster that begins and ends with the block (flows/servers/ray_local.py)
MLFLOW_TRACKING_URI  else SQLite, without a server
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import ServiceError
from penstock.flows.servers.prefect_server import ServerFiles, ServerInfo
from penstock.flows.servers.probes import TELEMETRY_OFF, http_get, mlflow_trouble, prefect_trouble, ray_address, ray_refusal
from penstock.installed import IMPORT_ROOT
from penstock.progress import announce_wait
from penstock.redact import redact_text

if TYPE_CHECKING:
    from penstock.flows.servers.ray_local import RayCluster

__all__ = [
    "PrefectService",
    "check_mlflow_answers",
    "check_prefect_answers",
    "prefect_api",
    "prepare_environment",
    "ray_cluster",
]

_QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # penstock reports by itself; the server's page has the records
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",  # each event that a server which is away does not take, in full
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",  # a missing server must fail, not start one that drops task runs
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500,504",  # one failure of a server must not end a run; 502 and 503 are retried anyway
}

_PREFECT = "the Prefect server"
"""In the line that is printed while it is waited for."""

_CHECK_EVERY_S = 1.0

_BOOT_S = 120.0
"""A first start creates the database: 15 s were seen on two busy cores."""


class PrefectService(NamedTuple):
    """A Prefect API that answered."""

    api_url: str
    ui_url: str
    embedded: bool


def prepare_environment() -> None:
    """Turn off the telemetry of Prefect, MLflow and Ray, and reach this machine without a proxy, here and in child processes.

    Variables of telemetry that are set stay.
    """
    for name, value in TELEMETRY_OFF.items():
        os.environ.setdefault(name, value)
    direct = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    if any(name.lower().endswith("_proxy") for name in os.environ) and "*" not in direct:
        hosts = ",".join(dict.fromkeys([*filter(None, direct), "127.0.0.1", "localhost"]))
        os.environ.update(no_proxy=hosts, NO_PROXY=hosts)  # libraries read one or the other


@contextlib.contextmanager
def prefect_api(state_dir: Path) -> Iterator[PrefectService]:
    """Make a Prefect API available and point this process at it, through PREFECT_API_URL, for the block.

    Enter it before importing anything that imports Prefect: settings are read on import. The embedded server takes 4 s and
    190 MB, unless another penstock process of this directory has it running. The first one on a machine takes 5 s more, to make
    the database that others copy.

    Args:
        state_dir: of the embedded server.

    Raises:
        ServiceError: the configured API does not answer, or the embedded server does not start.
    """
    prepare_environment()
    logging.raiseExceptions = False  # else Prefect reports each log line that a server does not accept
    configured = os.environ.get("PREFECT_API_URL")
    if configured:
        with announce_wait(_PREFECT):
            check_prefect_answers()
        with _environment(_QUIET):
            ui_url = os.environ.get("PREFECT_UI_URL") or configured.removesuffix("/api")
            try:
                yield PrefectService(configured, ui_url, embedded=False)
            finally:
                _flush_events(configured)
        return
    files = ServerFiles(state_dir)
    files.prepare()
    with files.open_lock("clients") as use:
        with announce_wait(_PREFECT):
            server = _use_server(files, use.fileno())
        quiet = {**_QUIET, "PREFECT_API_URL": server.url, "PREFECT_HOME": str(files.home)}
        with _environment(quiet), _started_again(files):
            try:
                yield PrefectService(server.url, server.ui_url, embedded=True)
            finally:
                _flush_events(server.url)


def _use_server(files: ServerFiles, use: int) -> ServerInfo:
    """Register as a client and return the running server, starting it if there is none."""
    with files.locked("start"):
        fcntl.flock(use, fcntl.LOCK_SH)
        child: subprocess.Popen[bytes] | None = None
        deadline = time.monotonic() + _BOOT_S
        while time.monotonic() < deadline:
            info = files.read_info()
            if files.is_free("server"):
                if child is not None and child.poll() is not None:
                    break
                if child is None:
                    child = _spawn_server(files)
            elif info is not None and _answers(f"{info.url}/health"):
                return info
            time.sleep(0.05)
    info, problem = files.read_info(), "ended while it started"
    if child is None or child.poll() is None:
        awaited = f"{info.url}/health does not answer" if info is not None else "it has published no address"
        problem = f"did not start within {_BOOT_S:g} s: {awaited}"
    raise ServiceError(
        f"the embedded Prefect server {problem}; the last lines of its log {files.log}:",
        problems=_last_lines(files.log) or ["(none)"],
        next_step=f"run the same command again once the machine is less busy, or set PREFECT_API_URL to a running server; a "
        f"damaged database (only Prefect's pages need it) is made anew once you move {files.database}* away",
    )


@contextlib.contextmanager
def _started_again(files: ServerFiles) -> Iterator[None]:
    """Restart the server whenever it dies in the block. Its port and database stay the same, so no client notices."""
    done = threading.Event()

    def watch() -> None:
        with files.open_lock("clients") as use, contextlib.suppress(ServiceError, OSError):
            while not done.wait(_CHECK_EVERY_S):
                if files.is_free("server"):
                    _use_server(files, use.fileno())

    thread = threading.Thread(target=watch, name="penstock-prefect-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def _spawn_server(files: ServerFiles) -> subprocess.Popen[bytes]:
    """Start the server in a session of its own, which Ctrl-C in the terminal does not reach."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(IMPORT_ROOT), os.environ.get("PYTHONPATH")]))}
    with open(files.log, "wb") as log:
        # -P: the current folder may hold a user's `penstock/`, which must not be imported instead.
        command = [sys.executable, "-P", "-m", "penstock.flows.servers.prefect_server", str(files.home.parent)]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def _last_lines(log: Path, count: int = 5) -> list[str]:
    try:
        return log.read_text(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def _flush_events(api_url: str) -> None:
    """Send the events and logs that Prefect still holds: task runs are recorded from events, and the server may end after us.

    If the server is away they are dropped: at the end of the process Prefect would retry each of them for a minute.
    """
    answers = _answers(f"{api_url.rstrip('/')}/health")
    for module, name in (("prefect.events.worker", "EventsWorker"), ("prefect.logging.handlers", "APILogWorker")):
        worker = getattr(sys.modules.get(module), name, None)
        if worker is not None:
            with contextlib.suppress(Exception):  # Prefect's own code; unsent events change nothing for the run
                if not answers:
                    for service in tuple(worker._instances.values()):
                        service._loop.call_soon_threadsafe(service._task.cancel)
                    continue
                # In a thread of its own: in one with a running loop, as in a notebook, Prefect would return a coroutine.
                drain = threading.Thread(target=worker.drain_all, kwargs={"timeout": 10, "at_exit": False}, daemon=True)
                drain.start()
                drain.join()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables that are not set, for the block."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    _reload_prefect()
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
        _reload_prefect()


def _reload_prefect() -> None:
    """Let Prefect read its settings again, which it otherwise does on import only."""
    context = sys.modules.get("prefect.context")
    if context is not None:
        context.refresh_global_settings_context()


def check_prefect_answers() -> None:
    """Raise ServiceError if PREFECT_API_URL names a server that is away."""
    url = os.environ.get("PREFECT_API_URL")
    if url and (trouble := prefect_trouble(url)) is not None:
        raise ServiceError(f"PREFECT_API_URL={url} {trouble.what}", next_step=trouble.fix)


def check_mlflow_answers() -> None:
    """Raise ServiceError if the MLflow server is away, before anything is started; the tracker would retry for longer."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if uri.startswith(("http://", "https://")) and (trouble := mlflow_trouble(uri)) is not None:
        raise ServiceError(f"MLFLOW_TRACKING_URI={redact_text(uri)} {trouble.what}", next_step=trouble.fix)


def _answers(url: str) -> bool:
    """Whether an HTTP server is there. One that refuses the login is."""
    status = http_get(url).status
    return status is not None and status < 500


@contextlib.contextmanager
def ray_cluster(state_dir: Path, *, min_cpus: float = 1) -> Iterator[RayCluster]:
    """Connect this process to Ray for the block: to RAY_ADDRESS if set, else to a cluster of its own on 127.0.0.1.

    The Ray that a program has started itself is used, and goes on.

    Args:
        state_dir: keeps the logs of the embedded cluster that ended last.
        min_cpus: at least so many logical CPUs of an embedded cluster, so that two workers and a data task fit on two cores.

    Raises:
        ServiceError: RAY_ADDRESS does not answer, or the embedded cluster does not start.
    """
    prepare_environment()
    # Importing Ray takes a second; commands that need no cluster do without.
    from penstock.flows.servers.ray_local import join_ray, local_ray, programs_ray

    address = ray_address()
    if (of_program := programs_ray()) is not None:
        yield of_program
    elif address is not None:
        check_ray_answers(address)
        with join_ray(address) as cluster:
            yield cluster
    else:
        with local_ray(state_dir, min_cpus) as cluster:
            yield cluster


def check_ray_answers(address: str) -> None:
    """Raise ServiceError for a RAY_ADDRESS that cannot be used."""
    refusal = ray_refusal(address)
    if refusal is not None:
        raise ServiceError(
            f"RAY_ADDRESS={address} {refusal}",
            next_step="start that cluster (ray start --head), or unset RAY_ADDRESS to use an embedded one",
        )
