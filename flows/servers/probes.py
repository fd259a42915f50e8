"""Do the servers, clusters and storages that settings name answer? Asked before a run."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from penstock.errors import Interrupted
from penstock.storage import Storage

__all__ = [
    "TELEMETRY_OFF",
    "HttpAnswer",
    "StorageFailure",
    "Trouble",
    "http_get",
    "mlflow_trouble",
    "prefect_trouble",
    "ray_address",
    "ray_refusal",
    "storage_failure",
]

TIMEOUT_S = 10.0
"""For one connection or one reply."""

TELEMETRY_OFF = {
    "DO_NOT_TRACK": "true",  # MLflow honours this spelling only; Prefect's client takes it, too
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class HttpAnswer(NamedTuple):
    """Answer to a GET.

    Attributes:
        status: None if there was no answer.
        text: the status in words; the reason of a failure.
    """

    status: int | None
    text: str


def http_get(url: str) -> HttpAnswer:
    """Send a GET, with the login inside the URL."""
    try:
        reply = httpx.get(url, timeout=TIMEOUT_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return HttpAnswer(None, str(error) or type(error).__name__)
    return HttpAnswer(reply.status_code, reply.reason_phrase)


class Trouble(NamedTuple):
    """Why a server cannot be used; a message has its address before `what`."""

    what: str
    fix: str


def prefect_trouble(url: str) -> Trouble | None:
    """Probe the health of a Prefect API."""
    base = url.rstrip("/")
    health = http_get(f"{base}/health")
    if health.status == 404 and http_get(f"{base}/api/health").status == 200:
        return Trouble("is the server's page; the address of its API ends in /api", f"export PREFECT_API_URL={base}/api")
    fix = "start that server (prefect server start), correct PREFECT_API_URL, or unset it: all commands but penstock deploy "
    return _trouble(health, f"{fix}start one of their own")


def mlflow_trouble(uri: str) -> Trouble | None:
    """Probe the health of an MLflow server."""
    fix = "start that server (mlflow server), correct MLFLOW_TRACKING_URI, or unset it to keep the records beside the file"
    return _trouble(http_get(f"{uri.rstrip('/')}/health"), fix)


def _trouble(answer: HttpAnswer, fix: str) -> Trouble | None:
    """Judge an answer; a server that refuses the login works."""
    if answer.status is None:
        return Trouble(f"does not answer: {answer.text}", fix)
    if answer.status < 400 or answer.status in (401, 403):
        return None
    return Trouble(f"answers with {answer.status} {answer.text}", fix)


def ray_address(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the cluster that RAY_ADDRESS names; None if a run starts its own Ray."""
    address = environ.get("RAY_ADDRESS", "")
    return None if address in ("", "local") else address


def ray_refusal(address: str) -> str | None:
    """Return why a RAY_ADDRESS cannot be used: Ray waits long for a head node that is not there. `auto` is left to Ray."""
    if address.startswith("ray://"):
        return "is an address of Ray Client, which is not supported: name the head node's own port (6379 by default)"
    if address == "auto":
        return None
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        if parts.port is None:
            return "does not answer: it has no port"
        socket.create_connection((parts.hostname or "", parts.port), timeout=TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        return f"does not answer: {error}"
    return None


class StorageFailure(NamedTuple):
    """The operation that a storage refused: an object cannot be written, listed, read or deleted."""

    verb: str
    error: Exception


def storage_failure(storage: Storage) -> StorageFailure | None:
    """Write, list, read and delete one small object; return the first failure."""
    folder, content = f".probe-{uuid.uuid4().hex[:8]}", b"written to see whether it can be; may be deleted"
    operations: tuple[tuple[str, Callable[[], object]], ...] = (
        ("written", lambda: storage.write_bytes(f"{folder}/object.txt", content)),
        ("listed", lambda: _expect(storage.list(folder), ["object.txt"])),
        ("read", lambda: _expect(storage.read_bytes(f"{folder}/object.txt"), content)),
        ("deleted", lambda: storage.delete(folder if storage.is_local else f"{folder}/object.txt")),
    )
    for verb, operation in operations:
        try:
            operation()
        except Interrupted:
            raise
        except Exception as error:  # every store has errors of its own
            return StorageFailure(verb, error)
    return None


def _expect(found: object, wanted: object) -> None:
    if found != wanted:
        raise OSError(f"expected {wanted!r}, found {found!r}")
