"""How does this process start a Ray cluster that leaves nothing behind, or join one?

The embedded cluster listens on 127.0.0.1 only, asks for a token, and keeps its files in a short temporary folder: a Unix
socket's path may have 107 bytes. Ray's processes end with the driver. After its SIGKILL that takes 3 s, and a minute for two
idle agents of 90 MB each, which wait for the head; the next start removes the folder.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray._private.node import Node

from penstock.errors import Interrupted, LeaseHeldError, ServiceError
from penstock.ingest.prepare import ClusterNode, living_nodes, most_resources
from penstock.installed import IMPORT_ROOT, PACKAGE_DIR
from penstock.machine.cache_dir import configured_cache
from penstock.redact import first_line, holds_secret
from penstock.temporary import own_folder, remove_unowned

__all__ = ["RayCluster", "join_ray", "local_ray", "programs_ray"]

_LONGEST_ROOT = 40
"""Bytes of the temporary folder's path: Ray appends up to 66 for its sockets."""

_OBJECT_STORE_BYTES = 2 << 30

_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes 127.0.0.1 the node's address on Linux too, as it is elsewhere; then Ray's servers listen there and on nothing else."""

_KEEP_WORKERS = {"RAY_idle_worker_killing_time_threshold_ms": "30000"}
"""Ray ends processes that are idle for a second where there are more than CPUs, and training holds some: tasks that prepare
rows between steps (`cache: none`) would wait two seconds for a new one each time."""

_DAEMONS = (ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER)
"""Without either of them the cluster does not answer."""

_PASSED_ON = ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_REQUEST_CHECKSUM_CALCULATION", "PENSTOCK_")
"""Prefixes of variables that are passed to a remote cluster's workers. Secrets are not: Ray's dashboard would show them, so the
nodes have their own. A cluster on this machine inherits everything."""


class RayCluster(NamedTuple):
    """A Ray this process is connected to."""

    address: str
    embedded: bool
    nodes: tuple[Mapping[str, float], ...]
    """Resources of each living node."""
    most: Mapping[str, float] | None
    """Resources that all nodes together can grow to, if an autoscaler has informed Ray; else None."""
    labels: tuple[Mapping[str, str], ...] = ()
    """Labels of each living node; empty if no node has any."""

    @property
    def labelled(self) -> list[ClusterNode]:
        """The nodes with their labels."""
        return list(map(ClusterNode, self.nodes, self.labels or repeat({})))

    @property
    def num_cpus(self) -> float:
        """CPUs of all nodes together."""
        return sum(node.get("CPU", 0.0) for node in self.nodes)

    @property
    def num_gpus(self) -> float:
        """GPUs of all nodes together."""
        return sum(node.get("GPU", 0.0) for node in self.nodes)


def _resources() -> dict[str, Any]:
    nodes, labels = zip(*living_nodes(), strict=True)
    return {"nodes": nodes, "labels": labels, "most": most_resources()}


def programs_ray() -> RayCluster | None:
    """Return the Ray that this process has started itself, as a program or a notebook does; None if there is none.

    Raises:
        ServiceError: it is a cluster of several machines, whose nodes were not prepared for a run.
    """
    if not ray.is_initialized():
        return None
    address = ray.get_runtime_context().gcs_address
    cluster = RayCluster(address, embedded=True, **_resources())
    if len(cluster.nodes) > 1:
        raise ServiceError(
            f"this program is connected to the Ray cluster {address} of {len(cluster.nodes)} nodes already",
            next_step=f"call penstock before ray.init, with RAY_ADDRESS={address} in the environment",
        )
    return cluster


@contextlib.contextmanager
def join_ray(address: str) -> Iterator[RayCluster]:
    """Connect to a running cluster for the block. Our package is sent along; its nodes need our dependencies only."""
    passed_on = {
        name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON) and not holds_secret(name, value)
    }
    runtime_env = {"env_vars": passed_on, "py_modules": [str(PACKAGE_DIR)]}
    with _temporary_root() as root, _connected(address, {"address": address, "runtime_env": runtime_env}, root):
        yield RayCluster(address, embedded=False, **_resources())


@contextlib.contextmanager
def local_ray(state_dir: Path, min_cpus: float) -> Iterator[RayCluster]:
    """Start a cluster for the block. Its logs are kept in `state_dir`/ray-cluster/logs until the next one ends."""
    cpus = max(len(os.sched_getaffinity(0)), math.ceil(min_cpus))
    port = _free_port()
    address = f"127.0.0.1:{port}"
    # Inherited by every process of the cluster. A runtime environment would do the same, and start all workers anew.
    # With its address the workers' State API cannot mistake another cluster on this machine for ours.
    inherited = {"RAY_ADDRESS": address, "PYTHONPATH": _python_path(), "RAY_GCS_SERVER_PORT": str(port)}
    inherited |= {name: os.environ.get(name, value) for name, value in _KEEP_WORKERS.items()}
    if cache := configured_cache():  # Ray's processes start in another folder
        inherited["PENSTOCK_CACHE_DIR"] = str(cache)
    logs = state_dir / "ray-cluster" / "logs"
    with _temporary_root() as root, _environment({**_auth(), **_LOOPBACK}):
        settings = {
            "address": "local",
            "num_cpus": cpus,
            "include_dashboard": False,
            "object_store_memory": min(_OBJECT_STORE_BYTES, psutil.virtual_memory().total // 4),
            "_temp_dir": str(root),
        }
        ray_constants.ENABLE_RAY_CLUSTER = False  # as _LOOPBACK, for this process, which has imported Ray already
        try:
            with contextlib.ExitStack() as stack:
                with _environment(inherited), _without_idle_daemons():
                    stack.enter_context(_connected("the embedded Ray", settings, root))
                stack.enter_context(_ending_with_it(partial(_keep_logs, root, logs), logs))
                yield RayCluster(address, embedded=True, **_resources())
        finally:
            _keep_logs(root, logs)


@contextlib.contextmanager
def _ending_with_it(keep_logs: Callable[[], None], logs: Path) -> Iterator[None]:
    """End this process with a message when one of the cluster's daemons ends in the block.

    Ray would end it without a message and with another exit code, once its core notices that the raylet is gone: in the midst
    of any call, or after workers without a driver have trained on.
    """
    over = threading.Event()

    def watch(name: str, pid: int) -> None:
        try:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return
        if status is None or over.is_set():
            return
        killed = status.si_code != os.CLD_EXITED
        how = f"was killed by {signal.Signals(status.si_status).name}" if killed else f"ended with code {status.si_status}"
        memory = "; the kernel's log (dmesg) says whether memory ran out" if killed else ""
        error = ServiceError(
            f"the embedded Ray has ended under this command: its {name} (pid {pid}) {how}",
            next_step=f"run the same command again, it continues; Ray's logs are in {logs}{memory}",
        )
        keep_logs()
        print(f"penstock: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)

    node: Any = ray_worker._global_node  # mypy takes it for None, which it is until `ray.init`
    for name in _DAEMONS:
        (daemon,) = node.all_processes[name]
        threading.Thread(target=watch, args=(name, daemon.process.pid), name=f"penstock-{name}-watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


@contextlib.contextmanager
def _without_idle_daemons() -> Iterator[None]:
    """Keep Ray from starting daemons in the block that are not needed on one machine.

    Together they take 2.3 s of CPU and 8 s of a new project's 47 s (2026-11-28, two busy cores, four turns). The monitor lets
    an autoscaler start nodes; the log monitor sends the workers' logs to a driver that prints them. Without `ray[default]` the
    dashboard's head has no page, and only sends usage reports, which are turned off.
    """
    idle = ["start_monitor"]
    if "PENSTOCK_RAY_LOGS" not in os.environ:
        idle.append("start_log_monitor")
    if os.environ.get("RAY_USAGE_STATS_ENABLED") == "0" and ray_utils.get_dashboard_dependency_error() is not None:
        idle.append("start_api_server")
    rays = {name: getattr(Node, name) for name in idle}
    for name in idle:
        setattr(Node, name, lambda _node, **_settings: None)
    try:
        yield
    finally:
        for name, own in rays.items():
            setattr(Node, name, own)


@contextlib.contextmanager
def _connected(what: str, settings: dict[str, Any], root: Path) -> Iterator[None]:
    # Ray puts the current folder on its workers' path, before installed packages: a user's own `training/` would be imported
    # there instead of ours.
    try:
        with _own_signal_handlers(), _own_process_groups(), _without_uv_hook(), contextlib.chdir(root):
            shows_logs = "PENSTOCK_RAY_LOGS" in os.environ
            if not shows_logs:  # Ray prints messages about nodes, in colours, even without `log_to_driver`
                ray_worker.listen_error_messages = lambda worker, threads_stopped: None
            try:
                ray.init(**settings, log_to_driver=shows_logs, logging_level=logging.ERROR)
            except (Interrupted, LeaseHeldError):
                signal.alarm(0)  # Ray's handler may have set it, see _own_signal_handlers
                raise
            except Exception as error:  # ray.init raises RuntimeError, ConnectionError, ValueError and its own
                raise ServiceError(
                    f"cannot connect to {what}: {first_line(error)}",
                    next_step="set PENSTOCK_RAY_LOGS=1 to see Ray's own messages",
                ) from error
        yield
    finally:
        with _own_signal_handlers():
            ray.shutdown()


@contextlib.contextmanager
def _without_uv_hook() -> Iterator[None]:
    """Start workers with the cluster's own Python even if this command was started by `uv run`.

    Ray would start each worker by `uv run` in a copy of the current folder, here Ray's own temporary folder: the copy is made
    inside of it and copies itself until the disk is full. On this machine the workers' Python is the driver's anyway; nodes of
    a remote cluster have an environment of their own.
    """
    rays, ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV, False
    try:
        yield
    finally:
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = rays


@contextlib.contextmanager
def _own_process_groups() -> Iterator[None]:
    """Put Ray's processes of the block into groups of their own, which signals to the driver's group do not reach.

    A Prefect worker, a service manager and a terminal signal the whole group. Ray's daemons would end at once on SIGTERM, while
    workers are about to save a checkpoint. Ray's processes end with the driver by themselves.
    """
    _own_group["wanted"] = True
    try:
        yield
    finally:
        _own_group["wanted"] = False


def _begin_child() -> None:
    if _own_group["wanted"]:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)  # held back in the driver only


_STOPS = (signal.SIGINT, signal.SIGTERM)

_own_group = {"wanted": False}

os.register_at_fork(after_in_child=_begin_child)


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Hold signals back in the block and restore our SIGTERM handler, which saves a checkpoint first, after it.

    `ray.init` sets a Python handler that exits at once. Ray's C++ core sets one below Python's, which aborts the process 3 s
    after the signal, even during a save (ray-project/ray#64830), or at once; `ray.shutdown` leaves none at all (#65749). An
    exception in the midst of `ray.init` is swallowed there, or leaves half of Ray. A thread of another library may still get a
    signal.
    """
    rays, ray_utils.set_sigterm_handler = ray_utils.set_sigterm_handler, lambda _handler: None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = rays
        ours = signal.getsignal(signal.SIGTERM)
        if ours is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ours)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _auth() -> dict[str, str | None]:
    """Return a token that only this process and its children know, unless the user has configured one.

    A process that can connect to Ray runs code as this user. Ray turns its token mode on by itself when RAY_AUTH_MODE is unset,
    and only then also in a process that has imported Ray before. It reads the token once per process.
    """
    if any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return {}
    return {"RAY_AUTH_TOKEN": _process_token(), "RAY_AUTH_MODE": None}


@functools.cache
def _process_token() -> str:
    return secrets.token_hex(32)


@contextlib.contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables for the block (None: leave alone) and restore all of them, even if they were changed inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: value for name, value in values.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _temporary_root() -> Iterator[Path]:
    """Make a private folder with a short path, and remove folders whose owners are dead."""
    base = Path(tempfile.gettempdir())
    prefix = f"penstock-ray-{os.getuid()}-"
    if len(str(base / prefix)) + 8 > _LONGEST_ROOT:
        base = Path("/tmp")
    remove_unowned(base.glob(f"{prefix}*"))
    root = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    with own_folder(root):
        try:
            yield root
        finally:
            shutil.rmtree(root, ignore_errors=True)


def _keep_logs(root: Path, target: Path) -> None:
    logs = root / "session_latest" / "logs"
    if logs.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            shutil.move(str(logs.resolve()), str(target))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _python_path() -> str:
    """Return PYTHONPATH with absolute folders: Ray's processes start in another folder."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join([str(IMPORT_ROOT), *map(os.path.abspath, given)])
