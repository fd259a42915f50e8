"""How long does the embedded Prefect server run? As long as a penstock process of its state directory, and a few seconds more.

`python -m penstock.flows.servers.prefect_server STATE_DIR` is that server, detached, on 127.0.0.1, with SQLite below
STATE_DIR/prefect.
Three locks, all released by the kernel when their holder dies, let several processes share one server:

    start.lock    held while a process looks for a server, starts one, or decides to end it
    clients.lock  shared by every process that uses the server
    server.lock   held by the server itself; while it is free, server.json is out of date

Prefect's own ephemeral mode is not used: it ends with the flow and then drops task runs that are still being recorded (46, 47
and 50 of 50 in three measured runs). This server ends only when it is not used and its message queues are empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from penstock.config import Section
from penstock.machine.empty_database import copy_database, keep_database
from penstock.machine.process import collect_rarely

__all__ = ["LINGER_ENV", "ServerFiles", "ServerInfo", "serve"]

LINGER_ENV = "PENSTOCK_SERVER_LINGER_S"

_CHECK_EVERY_S = 0.25

_IDLE_SERVICES = (
    "CANCELLATION_CLEANUP",
    "CLEANUP_RECONCILER",
    "FOREMAN",
    "LATE_RUNS",
    "PAUSE_EXPIRATIONS",
    "REPOSSESSOR",
    "SCHEDULER",
    "TRIGGERS",
)
"""Loops for deployments, workers and automations. Nothing is scheduled on a server that ends with its last client."""


class ServerInfo(Section):
    """The address of the embedded server."""

    pid: int
    port: int
    url: str
    """The API, such as `http://127.0.0.1:4201/api`."""

    @property
    def ui_url(self) -> str:
        """The web page."""
        return self.url.removesuffix("/api")


class ServerFiles:
    """The files of the embedded server below a state directory."""

    def __init__(self, state_dir: Path) -> None:
        self.home = state_dir.absolute() / "prefect"
        self.log = self.home / "server.log"
        self._info = self.home / "server.json"

    def prepare(self) -> None:
        """Make the folder."""
        self.home.mkdir(parents=True, exist_ok=True)

    def open_lock(self, name: str) -> IO[bytes]:
        """Open `name`.lock; closing the file releases the lock."""
        return open(self.home / f"{name}.lock", "ab")

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Wait for a lock and hold it alone in the block."""
        with self.open_lock(name) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def is_free(self, name: str) -> bool:
        """Whether the lock is free at this moment."""
        with self.open_lock(name) as handle:
            return try_lock(handle)

    def read_info(self) -> ServerInfo | None:
        """Return the address that the running server wrote; None while it starts."""
        try:
            return ServerInfo.model_validate_json(self._info.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    @property
    def database(self) -> Path:
        """The SQLite file of its flow runs."""
        return self.home / "prefect.db"

    def write_info(self, info: ServerInfo) -> None:
        """Publish the server's address, atomically."""
        temporary = self._info.with_suffix(".tmp")
        temporary.write_text(info.model_dump_json())
        temporary.replace(self._info)

    def remove_info(self) -> None:
        """Remove the published address."""
        self._info.unlink(missing_ok=True)


def try_lock(handle: IO[bytes]) -> bool:
    """Take the lock alone if it is free; return False otherwise."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def serve(state_dir: Path, linger_s: float) -> None:
    """Run the server until it has not been used for `linger_s` seconds; returns at once if one is running already."""
    files = ServerFiles(state_dir)
    files.prepare()
    with files.open_lock("server") as mine, socket.socket() as listener:
        if not _is_mine(mine):
            return
        files.remove_info()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = _bind(listener, files.home / "port")
        _configure(files, port)
        asyncio.run(_run(files, ServerInfo(pid=os.getpid(), port=port, url=f"http://127.0.0.1:{port}/api"), listener, linger_s))


def _is_mine(lock: IO[bytes], tries: int = 40) -> bool:
    """Take the server's lock, with retries: a client that checks whether it is free holds it for an instant."""
    for _ in range(tries):
        if try_lock(lock):
            return True
        time.sleep(0.05)
    return False


def _bind(listener: socket.socket, memory: Path) -> int:
    """Bind to the last server's port if it is free, so that bookmarks of the web page stay valid. Returns the port."""
    try:
        listener.bind(("127.0.0.1", int(memory.read_text())))
    except (OSError, ValueError, OverflowError):
        listener.bind(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])
    memory.write_text(str(port))
    return port


def _configure(files: ServerFiles, port: int) -> None:
    """Set Prefect's settings, which it reads when it is imported, and forget those of a team's server or client."""
    origin = f"http://127.0.0.1:{port}"
    os.chdir(files.home)  # for the database: a `?` in the folder's path would end the path in a URL; and for no prefect.toml
    settings = {
        "PREFECT_HOME": str(files.home),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": "sqlite+aiosqlite:///prefect.db",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # Any page in a browser on this machine could otherwise talk to the API.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": origin,
        "PREFECT_UI_API_URL": f"{origin}/api",
        "DO_NOT_TRACK": "true",
        "PREFECT_API_BLOCKS_REGISTER_ON_START": str(files.database.exists()).lower(),  # a new one has them, see _make_database
        "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",  # its file could not be read by others of the group
        **{f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in _IDLE_SERVICES},
    }
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        del os.environ[name]
    os.environ.update(settings)


async def _run(files: ServerFiles, info: ServerInfo, listener: socket.socket, linger_s: float) -> None:
    # Imported only now: Prefect reads the settings above on import.
    import uvicorn
    from prefect.server.api.server import create_app

    if not files.database.exists():
        await _make_database(files.database)
    config = uvicorn.Config(create_app(), log_level="error", lifespan="on", timeout_keep_alive=5, timeout_graceful_shutdown=3)
    server = uvicorn.Server(config)
    watching = asyncio.create_task(_watch(files, info, server, linger_s))
    try:
        await server.serve(sockets=[listener])
    finally:
        if files.read_info() == info:
            files.remove_info()
        watching.cancel()


async def _make_database(path: Path) -> None:
    """Make the database with Prefect's block types, whose registration is a fifth of a new server's start."""
    import prefect
    from prefect.server.database import provide_database_interface
    from prefect.server.models.block_registration import run_block_auto_registration

    name = f"prefect-{prefect.__version__}-blocks"
    if not copy_database(name, path):
        database = provide_database_interface()
        await database.create_db()
        async with await database.session() as session:
            await run_block_auto_registration(session)
        keep_database(name, path)


async def _watch(files: ServerFiles, info: ServerInfo, server: object, linger_s: float) -> None:
    """Publish the server's address once it answers; end it once it is not needed, or its folder is gone."""
    while not getattr(server, "started", False):
        await asyncio.sleep(0.02)
    last_used = time.monotonic()
    try:
        files.write_info(info)
        while time.monotonic() - last_used < linger_s or not _withdraw(files):
            await asyncio.sleep(_CHECK_EVERY_S)
            if files.read_info() != info:
                return  # the folder was deleted and made again, and another server may serve it
            if not files.is_free("clients") or _queued_messages():
                last_used = time.monotonic()
    finally:
        server.should_exit = True  # type: ignore[attr-defined]


def _withdraw(files: ServerFiles) -> bool:
    """Remove the published address unless a process is about to use the server."""
    with files.open_lock("start") as start, files.open_lock("clients") as clients:
        if not (try_lock(start) and try_lock(clients)):
            return False
        files.remove_info()
        return True


def _queued_messages() -> int:
    """Count the events that are accepted and not yet in the database, as far as this version of Prefect shows them."""
    messaging = sys.modules.get("prefect.server.utilities.messaging.memory")
    topics = getattr(getattr(messaging, "Topic", None), "_topics", {})
    queues = [subscription for topic in topics.values() for subscription in getattr(topic, "_subscriptions", ())]
    return sum(subscription._queue.qsize() + subscription._retry.qsize() for subscription in queues)


def main() -> None:
    """Entry point of `python -m penstock.flows.servers.prefect_server STATE_DIR`."""
    collect_rarely()
    serve(Path(sys.argv[1]), float(os.environ.get(LINGER_ENV, "3")))


if __name__ == "__main__":
    main()
