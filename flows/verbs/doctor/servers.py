"""Does what the environment points to answer: Prefect, MLflow, Ray and the storage? Asked as a run would ask."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from penstock.errors import PenstockError, PreflightError, ServiceError
from penstock.flows.servers.nodes import ask_nodes, installed_versions
from penstock.flows.servers.probes import (
    HttpAnswer,
    basic_login,
    connection_refusal,
    http_get,
    ray_address,
    ray_refusal,
    storage_failure,
)
from penstock.flows.verbs.doctor.finding import Finding, fail, ok, warn
from penstock.messages import said_of
from penstock.storage import Storage, filesystem_of
from penstock.stores import is_s3

__all__ = ["check_mlflow", "check_nodes", "check_prefect", "check_ray", "check_ray_auth", "check_storage"]


def check_prefect(environ: Mapping[str, str]) -> Finding:
    """Ask the Prefect API for its health, then for something that needs the login."""
    name, url = "PREFECT_API_URL", environ.get("PREFECT_API_URL", "").rstrip("/")
    if not url:
        return ok(name, "not set: every run starts its own server")
    fix = "start it (prefect server start), correct PREFECT_API_URL (it ends in /api), or unset it"
    health, login = f"{url}/health", _login(environ.get("PREFECT_API_KEY"), environ.get("PREFECT_API_AUTH_STRING"))
    if (refusal := _refusal(name, health, http_get(health), fix)) is not None:
        return refusal
    version = http_get(f"{url}/admin/version", login)
    refusal = _refusal(name, url, version, "set PREFECT_API_AUTH_STRING or PREFECT_API_KEY")
    return refusal or ok(name, f"{url} answers, version {version.text.strip()[:40]}")


def check_mlflow(environ: Mapping[str, str]) -> Finding:
    """Ask an MLflow server for its health, then for something that needs the login; other stores are only named."""
    name, uri = "MLFLOW_TRACKING_URI", environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
    if not uri:
        return ok(name, "not set: runs are kept in SQLite beside the pipeline file")
    if not uri.startswith(("http://", "https://")):
        return ok(name, f"{uri} is no server; whether it can be opened shows with the first run")
    user, password = environ.get("MLFLOW_TRACKING_USERNAME", ""), environ.get("MLFLOW_TRACKING_PASSWORD", "")
    login = _login(environ.get("MLFLOW_TRACKING_TOKEN"), f"{user}:{password}" if user else None)
    fix = "start it (mlflow server), correct MLFLOW_TRACKING_URI, or unset it"
    if (refusal := _refusal(name, f"{uri}/health", http_get(f"{uri}/health"), fix)) is not None:
        return refusal
    experiments = http_get(f"{uri}/api/2.0/mlflow/experiments/search?max_results=1", login)
    fix = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    return _refusal(name, uri, experiments, fix) or ok(name, f"{uri} answers")


def check_ray(environ: Mapping[str, str]) -> Finding:
    """Open a connection to the Ray cluster's address."""
    name, address = "RAY_ADDRESS", ray_address(environ)
    if address is None:
        return ok(name, f"{environ.get(name) or 'not set'}: every run starts a Ray of its own on this machine")
    if address == "auto":
        return ok(name, "auto: a run connects to the Ray that was started on this machine")
    refusal = ray_refusal(address)
    if refusal is not None:
        fix = "start the cluster (ray start --head), correct RAY_ADDRESS (host:6379), or unset it"
        return fail(name, f"{address} {refusal}", fix)
    return ok(name, f"{address} accepts connections")


def check_nodes(storage: Storage | None, environ: Mapping[str, str]) -> list[Finding]:
    """Join the cluster that RAY_ADDRESS names, and ask each of its nodes what a run would ask."""
    # It loads Ray, which only this check needs.
    from penstock.flows.servers.ray_local import join_ray

    name, address = "Ray nodes", ray_address(environ)
    assert address is not None
    try:
        with join_ray(address) as cluster:
            troubles = ask_nodes(storage, installed_versions())
    except PenstockError as error:
        return [fail(name, error.message, error.next_step)]
    seen = "have the same libraries" if storage is None else f"have the same libraries and reach {storage.root}"
    return [fail(f"Ray node {node}", what, fix) for node, what, fix in troubles] or [
        ok(name, f"all that give CPUs ({cluster.num_cpus:g} together) {seen}")
    ]


def check_ray_auth(environ: Mapping[str, str], home: Path | None = None) -> Finding:
    """Whether driver and cluster can agree: both sides must have the same RAY_AUTH_MODE, and the same token."""
    name, mode = "RAY_AUTH_MODE", environ.get("RAY_AUTH_MODE", "")
    remote = ray_address(environ) is not None
    path = Path(environ.get("RAY_AUTH_TOKEN_PATH") or (home or Path(os.path.expanduser("~"))) / ".ray" / "auth_token")
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
        detail = "disabled: any process that reaches the cluster's ports can run code on it"
        return warn(name, detail, "set RAY_AUTH_MODE=token on every node and here, or keep the ports in a private network")
    return ok(name, f"{mode or 'not set'}; {'a token is here' if has_token else 'no token'}")


def check_storage(storage: Storage, environ: Mapping[str, str]) -> list[Finding]:
    """Put, list, get and delete one small object, then ask whether the store can put only where nothing is."""
    name = f"storage {storage.root}"
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if is_s3(storage.root) and endpoint:
        refusal = connection_refusal(endpoint, 443 if endpoint.startswith("https") else 80)
        if refusal is not None:  # its client would take up to 40 s to say so
            return [fail(name, f"the endpoint {endpoint} does not answer: {refusal}", "start it, or correct AWS_ENDPOINT_URL")]
    try:
        storage.refuse_file()
    except PreflightError as error:
        return [fail(name, error.message, error.next_step)]
    started = time.monotonic()
    failure = storage_failure(storage)
    if failure is not None and isinstance(failure.error, ServiceError):
        return [fail(name, f"an object cannot be {failure.verb}: {failure.error.message}", failure.error.next_step)]
    if failure is not None:
        return [fail(name, f"an object cannot be {failure.verb}: {_in_words(failure.error)}", _storage_fix(storage))]
    took_ms = (time.monotonic() - started) * 1000
    findings = [ok(name, f"an object was written, listed, read and deleted in {took_ms:.0f} ms")]
    return findings if storage.is_local else [*findings, _conditional_put(storage)]


def _conditional_put(storage: Storage) -> Finding:
    """Whether a second writer is kept from an object that is there. The store's answer is not believed; its content is."""
    name, careful = "conditional put", "do not start the same pipeline from two machines in the same second"
    probe = f".probe-{uuid.uuid4().hex[:8]}"
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


def _in_words(error: BaseException) -> str:
    """The error and its first cause: what object stores' clients wrap says less than what they wrapped."""
    first = error
    while (inner := first.__cause__ or first.__context__) is not None:
        first = inner
    text = said_of(error)
    return text if first is error or str(first) in text else f"{text} ({type(first).__name__}: {first})"


def _storage_fix(storage: Storage) -> str:
    if storage.is_local:
        return f"make {storage.root} a folder that you may write to"
    if is_s3(storage.root):
        return (
            "check that the bucket exists, then AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or the profile)"
        )
    return "check the URL and the credentials that its fsspec filesystem wants"


def _login(token: str | None, user_and_password: str | None) -> dict[str, str]:
    if token:
        return {"Authorization": f"Bearer {token}"}
    return basic_login(user_and_password) if user_and_password else {}


def _refusal(name: str, url: str, answer: HttpAnswer, fix: str) -> Finding | None:
    """The finding that tells why a GET has no success; None if it has."""
    if answer.status is None:
        return fail(name, f"{url} does not answer: {answer.text}", fix)
    if answer.status in (401, 403):
        return fail(name, f"{url} refuses the login ({answer.status})", fix)
    return fail(name, f"{url} answers with {answer.status} {answer.text}", fix) if answer.status >= 400 else None
