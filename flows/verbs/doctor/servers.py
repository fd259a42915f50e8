"""Does what the environment points to answer: Prefect, MLflow, Ray and the storage? Asked as a run would ask."""

from __future__ import annotations

import base64
import socket
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from penstock.flows.verbs.doctor.finding import Finding, fail, ok, warn
from penstock.storage import Storage, filesystem_of

__all__ = ["check_mlflow", "check_prefect", "check_ray", "check_ray_auth", "check_storage"]


TIMEOUT_S = 5.0
"""For one connection or one reply."""


def check_prefect(environ: Mapping[str, str]) -> Finding:
    """Ask the Prefect API for its health, then for something that needs the login."""
    name, url = "PREFECT_API_URL", environ.get("PREFECT_API_URL", "")
    if not url:
        return ok(name, "not set: every run starts its own server")
    headers = _login(environ.get("PREFECT_API_KEY"), environ.get("PREFECT_API_AUTH_STRING"))
    fix = "start it (prefect server start), correct PREFECT_API_URL (it ends in /api), or unset it"
    healthy = _ask(name, f"{url.rstrip('/')}/health", {}, fix)
    if isinstance(healthy, Finding):
        return healthy
    login = _ask(name, f"{url.rstrip('/')}/admin/version", headers, "set PREFECT_API_AUTH_STRING or PREFECT_API_KEY")
    return login if isinstance(login, Finding) else ok(name, f"{url} answers, version {login.strip()[:40]}")


def check_mlflow(environ: Mapping[str, str]) -> Finding:
    """Ask an MLflow server for its health, then for something that needs the login; other stores are only named."""
    name, uri = "MLFLOW_TRACKING_URI", environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        return ok(name, "not set: runs are kept in SQLite beside the pipeline file")
    if not uri.startswith(("http://", "https://")):
        return ok(name, f"{uri} is no server; whether it can be opened shows with the first run")
    token = environ.get("MLFLOW_TRACKING_TOKEN")
    user, password = environ.get("MLFLOW_TRACKING_USERNAME", ""), environ.get("MLFLOW_TRACKING_PASSWORD", "")
    headers = _login(token, f"{user}:{password}" if user else None)
    fix = "start it (mlflow server), correct MLFLOW_TRACKING_URI, or unset it"
    healthy = _ask(name, f"{uri.rstrip('/')}/health", {}, fix)
    if isinstance(healthy, Finding):
        return healthy
    experiments = f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/search?max_results=1"
    login = _ask(
        name, experiments, headers, "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    )
    return login if isinstance(login, Finding) else ok(name, f"{uri} answers")


def check_ray(environ: Mapping[str, str]) -> Finding:
    """Open a connection to the Ray cluster's address."""
    name, address = "RAY_ADDRESS", environ.get("RAY_ADDRESS", "")
    if not address or address == "local":
        return ok(name, f"{address or 'not set'}: every run starts a Ray of its own on this machine")
    if address == "auto":
        return ok(name, "auto: a run connects to the Ray that was started on this machine")
    host, port = _host_and_port(address)
    fix = "start the cluster (ray start --head), correct RAY_ADDRESS (host:6379, or ray://host:10001), or unset it"
    if port is None:
        return fail(name, f"{address!r} has no port", fix)
    refused = _connect(host, port)
    return fail(name, f"{address}: {refused}", fix) if refused else ok(name, f"{address} accepts connections")


def check_ray_auth(environ: Mapping[str, str], home: Path | None = None) -> Finding:
    """Whether driver and cluster can agree: both sides must have the same RAY_AUTH_MODE, and the same token."""
    name, mode = "RAY_AUTH_MODE", environ.get("RAY_AUTH_MODE", "")
    remote = environ.get("RAY_ADDRESS", "") not in ("", "local")
    path = Path(environ.get("RAY_AUTH_TOKEN_PATH") or (home or Path.home()) / ".ray" / "auth_token")
    has_token = bool(environ.get("RAY_AUTH_TOKEN")) or path.is_file()
    if mode not in ("", "token", "disabled"):
        return fail(name, f"{mode!r} is no mode", "set it to token or disabled, the same on every node and here")
    if mode == "token" and not has_token:
        return fail(name, f"token, but RAY_AUTH_TOKEN is not set and {path} is not there", "copy the cluster's token to it")
    if environ.get("RAY_AUTH_TOKEN_PATH") and not path.is_file() and not environ.get("RAY_AUTH_TOKEN"):
        return fail(name, f"RAY_AUTH_TOKEN_PATH names {path}, which is not there", "correct the path")
    if remote and not mode:
        detail = "not set, but RAY_ADDRESS names a cluster; whether the token is sent depends on Ray's default"
        return warn(name, detail, "set RAY_AUTH_MODE to what the cluster was started with (token or disabled)")
    if remote and mode == "disabled":
        detail = "disabled: anybody who reaches the cluster's ports can run code on it"
        return warn(name, detail, "set RAY_AUTH_MODE=token on every node and here, or keep the ports in a private network")
    return ok(name, f"{mode or 'not set'}; {'a token is here' if has_token else 'no token'}")


def check_storage(storage: Storage, environ: Mapping[str, str]) -> list[Finding]:
    """Put, list, get and delete one small object, then ask whether the store can put only where nothing is."""
    name = f"storage {storage.root}"
    if not storage.is_local:
        endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
        if storage.root.startswith("s3") and endpoint:
            host, port = _host_and_port(endpoint)
            refused = _connect(host, port or (443 if endpoint.startswith("https") else 80))
            if refused:
                return [
                    fail(name, f"the endpoint {endpoint} does not answer: {refused}", "start it, or correct AWS_ENDPOINT_URL")
                ]
    probe = f".penstock-doctor-{uuid.uuid4().hex[:8]}"
    content = b"written by penstock doctor; may be deleted"
    steps: list[tuple[str, Callable[[], object]]] = [
        ("written", lambda: storage.write_bytes(f"{probe}/object", content)),
        ("listed", lambda: _expect(storage.list(probe), ["object"])),
        ("read", lambda: _expect(storage.read_bytes(f"{probe}/object"), content)),
        ("deleted", lambda: storage.delete(probe)),
    ]
    started = time.monotonic()
    for done, step in steps:
        try:
            step()
        except Exception as error:  # stores without it raise whatever their clients do
            return [fail(name, f"an object cannot be {done}: {_in_words(error)}", _storage_fix(storage))]
    took_ms = (time.monotonic() - started) * 1000
    findings = [ok(name, f"an object was written, listed, read and deleted in {took_ms:.0f} ms")]
    if not storage.is_local:
        findings.append(_conditional_put(storage, probe))
    return findings


def _conditional_put(storage: Storage, probe: str) -> Finding:
    """Whether a second writer is kept from an object that is there. The store's answer is not believed; its content is."""
    name, careful = "conditional put", "do not start the same pipeline from two machines in the same second"
    fs, path = filesystem_of(storage.uri(f"{probe}/exclusive"))
    try:
        fs.pipe_file(path, b"first", mode="create")
        with suppress(OSError):
            fs.pipe_file(path, b"second", mode="create")
        kept = fs.cat_file(path) == b"first"
    except Exception as error:  # stores refuse with errors of their own
        return warn(name, f"not supported: {_in_words(error)}", careful)
    finally:
        storage.delete(probe)
    if kept:
        return ok(name, "the store refuses to create what is there: two runs cannot take the same lease")
    return warn(name, "the store overwrites what should only be created: leases rely on reading back what was written", careful)


def _expect(found: object, wanted: object) -> None:
    if found != wanted:
        raise OSError(f"expected {wanted!r}, found {found!r}")


def _in_words(error: BaseException) -> str:
    """The error and its first cause: what object stores' clients wrap says less than what they wrapped."""
    first = error
    while (inner := first.__cause__ or first.__context__) is not None:
        first = inner
    text = f"{type(error).__name__}: {error}"
    return text if first is error or str(first) in text else f"{text} ({type(first).__name__}: {first})"


def _storage_fix(storage: Storage) -> str:
    if storage.is_local:
        return f"make {storage.root} a folder that you may write to"
    if storage.root.startswith("s3"):
        return (
            "check that the bucket exists, then AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or the profile)"
        )
    return "check the URL and the credentials that its fsspec filesystem wants"


def _login(token: str | None, user_and_password: str | None) -> dict[str, str]:
    if token:
        return {"Authorization": f"Bearer {token}"}
    if user_and_password:
        return {"Authorization": "Basic " + base64.b64encode(user_and_password.encode()).decode()}
    return {}


def _ask(name: str, url: str, headers: Mapping[str, str], fix: str) -> str | Finding:
    """The body of a GET, or the finding that tells why there is none."""
    parts = urlsplit(url)
    if parts.username:  # urllib does not understand a login inside the URL
        headers = _login(None, f"{parts.username}:{parts.password or ''}")
        url = url.replace(f"{parts.netloc.rpartition('@')[0]}@", "", 1)
    try:
        request = urllib.request.Request(url, headers=dict(headers))
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return str(reply.read(4096).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return fail(name, f"{url} refuses the login ({error.code})", fix)
        return fail(name, f"{url} answers with {error.code} {error.reason}", fix)
    except (OSError, ValueError) as error:
        return fail(name, f"{url} does not answer: {getattr(error, 'reason', error)}", fix)


def _host_and_port(address: str) -> tuple[str, int | None]:
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        return parts.hostname or "", parts.port
    except ValueError:
        return parts.hostname or "", None


def _connect(host: str, port: int) -> str:
    """Empty if the port accepts a connection, else why not."""
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return ""
