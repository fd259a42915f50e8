"""Would a run work on this machine, with the servers its environment names? Lists findings, each with the next command.

Servers and storage are probed as a run probes them. Every check runs in a thread of its own under one deadline: a server that
accepts a connection and never answers is a finding, not a hanging doctor.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement
from rich.console import Console

from penstock.config import Section
from penstock.errors import PenstockError, PreflightError, ServiceError
from penstock.flows.preflight import nodes
from penstock.flows.servers.probes import (
    Trouble,
    basic_login,
    connection_refusal,
    login_trouble,
    mlflow_trouble,
    prefect_trouble,
    ray_address,
    ray_refusal,
    storage_failure,
)
from penstock.messages import counted, describe_error
from penstock.redact import redact_text
from penstock.storage import Storage, existing_folder, filesystem_of
from penstock.stores import is_local, is_s3

__all__ = ["Finding", "diagnose", "show_findings"]


DEADLINE_S = 60.0
"""Seconds for all checks, which run side by side; S3 clients take up to 40 s to give up on an endpoint."""

FREE_FAIL_BYTES = 1 << 30

FREE_WARN_BYTES = 5 << 30
"""Below the first a run fails; below the second a dataset and a few checkpoints may not fit."""

RAY_FULL_DISK = 0.95
"""Share of a disk in use from which Ray refuses to spill objects to it (its local_fs_capacity_threshold)."""

SHOWN = ("prefect", "fastapi", "ray", "mlflow", "torch", "pyarrow", "numpy", "s3fs", "boto3")
"""Libraries whose versions are shown."""

_STYLE = {"ok": "green", "warn": "yellow", "fail": "red"}


class Finding(Section):
    """The state of a library, a server or a disk, without secrets."""

    name: str
    status: Literal["ok", "warn", "fail"]
    """`fail`: a run would not work. `warn`: it would, but may fail later."""
    detail: str
    fix: str = ""
    """The next command or edit; empty if there is nothing to do."""


def _finding(status: Literal["ok", "warn", "fail"], name: str, detail: str, fix: str = "") -> Finding:
    """Make a finding, with secrets redacted."""
    return Finding(name=name, status=status, detail=redact_text(detail), fix=redact_text(fix))


ok, warn, fail = partial(_finding, "ok"), partial(_finding, "warn"), partial(_finding, "fail")

Check = tuple[str, Callable[[], Sequence[Finding]]]
"""(name, function)."""


def diagnose(storage_uri: str | None, environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Check everything that a run would need.

    Args:
        storage_uri: a storage to try as well; None checks the disk of the current directory.
        environ: the settings to judge; None takes the process's own.
    """
    settings = dict(os.environ if environ is None else environ)
    storage = None if storage_uri is None else Storage(storage_uri)
    place = "." if storage_uri is None or not is_local(storage_uri) else storage_uri
    checks: list[Check] = [
        ("libraries", check_libraries),
        ("torch", lambda: [check_torch()]),
        ("disk", lambda: check_disks(place)),
        ("PREFECT_API_URL", lambda: [check_prefect(settings)]),
        ("MLFLOW_TRACKING_URI", lambda: [check_mlflow(settings)]),
        ("RAY_ADDRESS", lambda: [check_ray(settings)]),
        ("RAY_AUTH_MODE", lambda: [check_ray_auth(settings)]),
    ]
    if storage is not None:
        checks.append((f"storage {redact_text(storage.root)}", lambda: check_storage(storage, settings)))
    findings = run_checks(checks)
    blocked = any(finding.status == "fail" and finding.name.startswith(("RAY_", "storage ")) for finding in findings)
    if ray_address(settings) is not None and not blocked:
        # After the others: Ray changes the working directory of the process while it connects.
        findings += run_checks([("Ray nodes", lambda: check_nodes(storage, settings))], DEADLINE_S + nodes.TIMEOUT_S)
    return findings


def run_checks(checks: Sequence[Check], deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Run all checks side by side; the findings come in the order of the checks. A check that raises or hangs is a finding."""
    results: dict[int, Sequence[Finding]] = {}

    def run(index: int, name: str, check: Callable[[], Sequence[Finding]]) -> None:
        try:
            results[index] = check()
        except Exception as error:  # of any class: one broken check must not hide the others
            results[index] = [fail(name, f"the check itself failed: {describe_error(error)}", "report this defect")]

    threads = [threading.Thread(target=run, args=(index, *check), daemon=True) for index, check in enumerate(checks)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    silent = "check that it runs and that no firewall drops the connection"
    return [
        finding
        for index, (name, _) in enumerate(checks)
        for finding in results.get(index) or [fail(name, f"no answer within {deadline_s:g} s", silent)]
    ]


def show_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print each finding with its fix below, and the counts."""
    width = max((len(finding.name) for finding in findings), default=0)
    for finding in findings:
        console.print(f"{finding.status:<4}  ", style=_STYLE[finding.status], end="")
        console.print(f"{finding.name:<{width}}  {finding.detail}")
        if finding.fix:
            console.print(f"{'':<{width + 8}}-> {finding.fix}")
    counts = {status: sum(finding.status == status for finding in findings) for status in _STYLE}
    console.print(f"{counts['ok']} ok, {counts['warn']} to watch, {counts['fail']} in the way")


def check_libraries() -> list[Finding]:
    """Compare the installed versions with those that penstock needs."""
    try:
        wanted = [Requirement(text) for text in requires("penstock") or []]
    except PackageNotFoundError:
        return [warn("libraries", "penstock is not installed; it runs from a folder", "pip install -e . -c constraints.txt")]
    findings = []
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = _version(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            install = f'pip install "{requirement.name}{requirement.specifier}" -c constraints.txt'
            detail = f"{found or 'not installed'}; penstock needs {requirement.specifier}"
            findings.append(fail(requirement.name, detail, install))
    python = f"Python {'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}"
    return findings or [ok("libraries", ", ".join([python, *(f"{name} {_version(name)}" for name in SHOWN)]))]


def check_torch() -> Finding:
    """Check that torch can use the GPU of this machine."""
    import torch  # it takes a second, and only this check needs it

    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return ok("torch", f"{torch.__version__} with {counted(len(devices), 'GPU')}: {', '.join(sorted(set(devices)))}")
    if shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0:
        cuda = torch.version.cuda
        reason = "is a build without CUDA" if cuda is None else f"(CUDA {cuda}) cannot use the driver"
        return warn(
            "torch",
            f"this machine has a GPU, but torch {torch.__version__} {reason}; training would run on the CPU",
            f"pip install --force-reinstall --no-deps 'torch==={torch.__version__.split('+')[0]}', or update the driver",
        )
    return ok("torch", f"{torch.__version__} on {counted(psutil.cpu_count() or 1, 'CPU')}; no GPU")


def check_disks(storage: str) -> list[Finding]:
    """Check the free space for state and prepared data at the local path `storage`, and where Ray spills."""
    folder = existing_folder(Path(storage.removeprefix("file://")).expanduser().absolute())
    temporary, name = Path(tempfile.gettempdir()), "disk of temporary files"
    used = psutil.disk_usage(str(temporary)).percent / 100
    findings = [_free_space("disk of the storage", folder)]
    if used <= RAY_FULL_DISK:
        return [*findings, _free_space(name, temporary)]
    full = f"{temporary} is {used:.0%} full; Ray spills nothing to a disk that is more than {RAY_FULL_DISK:.0%} full"
    return [*findings, fail(name, full, "free some space, or set TMPDIR to a folder on another disk")]


def check_prefect(environ: Mapping[str, str]) -> Finding:
    """Check the health of the Prefect API, then the login."""
    name, url = "PREFECT_API_URL", environ.get("PREFECT_API_URL", "").rstrip("/")
    if not url:
        return ok(name, "not set: every run starts its own server")
    login = _login(environ.get("PREFECT_API_KEY"), environ.get("PREFECT_API_AUTH_STRING"))
    trouble = prefect_trouble(url) or login_trouble(
        f"{url}/admin/version", login, "set PREFECT_API_AUTH_STRING or PREFECT_API_KEY"
    )
    return _server(name, url, trouble)


def check_mlflow(environ: Mapping[str, str]) -> Finding:
    """Check the health of an MLflow server, then the login; other stores are only named."""
    name, uri = "MLFLOW_TRACKING_URI", environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
    if not uri:
        return ok(name, "not set: runs are kept in SQLite beside the pipeline file")
    if not uri.startswith(("http://", "https://")):
        return ok(name, f"{uri} is not a server; the first run shows whether it can be opened")
    user, password = environ.get("MLFLOW_TRACKING_USERNAME", ""), environ.get("MLFLOW_TRACKING_PASSWORD", "")
    login = _login(environ.get("MLFLOW_TRACKING_TOKEN"), f"{user}:{password}" if user else None)
    fix = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    trouble = mlflow_trouble(uri) or login_trouble(f"{uri}/api/2.0/mlflow/experiments/search?max_results=1", login, fix)
    return _server(name, uri, trouble)


def check_ray(environ: Mapping[str, str]) -> Finding:
    """Open a connection to the Ray cluster's address."""
    name, address = "RAY_ADDRESS", ray_address(environ)
    if address is None:
        return ok(name, f"{environ.get(name) or 'not set'}: every run starts a Ray of its own on this machine")
    if address == "auto":
        return ok(name, "auto: a run connects to the Ray that was started on this machine")
    refusal = ray_refusal(address)
    if refusal is None:
        return ok(name, f"{address} accepts connections")
    return fail(
        name, f"{address} {refusal}", "start the cluster (ray start --head), correct RAY_ADDRESS (host:6379), or unset it"
    )


def check_nodes(storage: Storage | None, environ: Mapping[str, str]) -> list[Finding]:
    """Join the cluster that RAY_ADDRESS names, and check each of its nodes as a run would."""
    from penstock.flows.servers.ray_local import join_ray  # it loads Ray, which only this check needs

    name, address = "Ray nodes", ray_address(environ)
    assert address is not None
    try:
        with join_ray(address) as cluster:
            problems = nodes.check_nodes(storage, nodes.installed_versions())
    except PenstockError as error:
        return [fail(name, error.message, error.next_step)]
    seen = "have the same libraries" if storage is None else f"have the same libraries and reach {storage.root}"
    return [fail(f"Ray node {problem.names}", problem.what, problem.fix) for problem in problems] or [
        ok(name, f"all that give CPUs ({cluster.num_cpus:g} together) {seen}")
    ]


def check_ray_auth(environ: Mapping[str, str], home: Path | None = None) -> Finding:
    """Check RAY_AUTH_MODE and the token, which must be the same here and on the cluster."""
    name, mode = "RAY_AUTH_MODE", environ.get("RAY_AUTH_MODE", "")
    remote = ray_address(environ) is not None
    path = Path(environ.get("RAY_AUTH_TOKEN_PATH") or (home or Path(os.path.expanduser("~"))) / ".ray" / "auth_token")
    has_token = bool(environ.get("RAY_AUTH_TOKEN")) or path.is_file()
    if mode not in ("", "token", "disabled"):
        return fail(name, f"{mode!r} is not a valid mode (token, disabled)", "set it to the same on every node and here")
    if mode == "token" and not has_token:
        return fail(name, f"token, but RAY_AUTH_TOKEN is not set and {path} is not there", "copy the cluster's token to it")
    if remote and not mode:
        detail = "not set, but RAY_ADDRESS names a cluster; whether the token is sent depends on Ray's default"
        return warn(name, detail, "set RAY_AUTH_MODE to what the cluster was started with (token or disabled)")
    if remote and mode == "disabled":
        detail = "disabled: any process that reaches the cluster's ports can run code on it"
        return warn(name, detail, "set RAY_AUTH_MODE=token on every node and here, or keep the ports in a private network")
    return ok(name, f"{mode or 'not set'}; {'a token is set' if has_token else 'no token'}")


def check_storage(storage: Storage, environ: Mapping[str, str]) -> list[Finding]:
    """Write, list, read and delete one small object, then check conditional puts."""
    name = f"storage {storage.root}"
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if is_s3(storage.root) and endpoint:
        refusal = connection_refusal(endpoint, 443 if endpoint.startswith("https") else 80)
        if refusal is not None:  # its client would take up to 40 s to find out
            return [fail(name, f"the endpoint {endpoint} does not answer: {refusal}", "start it, or correct AWS_ENDPOINT_URL")]
    try:
        storage.refuse_file()
    except PreflightError as error:
        return [fail(name, error.message, error.next_step)]
    started = time.monotonic()
    failure = storage_failure(storage)
    if failure is not None:
        why, what = failure.error, f"an object cannot be {failure.verb}"
        if isinstance(why, ServiceError):
            return [fail(name, f"{what}: {why.message}", why.next_step)]
        return [fail(name, f"{what}: {_with_cause(why)}", _storage_fix(storage))]
    took_ms = (time.monotonic() - started) * 1000
    findings = [ok(name, f"an object was written, listed, read and deleted in {took_ms:.0f} ms")]
    return findings if storage.is_local else [*findings, _conditional_put(storage)]


def _conditional_put(storage: Storage) -> Finding:
    """Check that the store does not overwrite an existing object on create, by the object's content."""
    name, careful = "conditional put", "do not start the same pipeline from two machines in the same second"
    probe = f".probe-{uuid.uuid4().hex[:8]}"
    fs, path = filesystem_of(storage.uri(f"{probe}/exclusive"))
    try:
        fs.pipe_file(path, b"first", mode="create")
        with suppress(OSError):
            fs.pipe_file(path, b"second", mode="create")
        kept = fs.cat_file(path) == b"first"
    except Exception as error:  # stores refuse with errors of their own
        return warn(name, f"not supported: {_with_cause(error)}", careful)
    finally:
        storage.delete(probe)
    if kept:
        return ok(name, "the store refuses to create an existing object: two runs cannot take the same lease")
    return warn(name, "the store overwrites an existing object on create: leases are checked by reading them back", careful)


def _server(name: str, url: str, trouble: Trouble | None) -> Finding:
    return ok(name, f"{url} answers") if trouble is None else fail(name, f"{url} {trouble.what}", trouble.fix)


def _login(token: str | None, user_and_password: str | None) -> dict[str, str]:
    if token:
        return {"Authorization": f"Bearer {token}"}
    return basic_login(user_and_password) if user_and_password else {}


def _with_cause(error: BaseException) -> str:
    """Describe the error and its first cause: clients of object stores wrap the informative error."""
    first = error
    while (inner := first.__cause__ or first.__context__) is not None:
        first = inner
    text = describe_error(error)
    return text if first is error or str(first) in text else f"{text} ({type(first).__name__}: {first})"


def _storage_fix(storage: Storage) -> str:
    if storage.is_local:
        return f"make {storage.root} a folder that you may write to"
    if is_s3(storage.root):
        return (
            "check that the bucket exists, then AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or the profile)"
        )
    return "check the URL and the credentials of its fsspec filesystem"


def _free_space(name: str, folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    detail = f"{free / (1 << 30):,.1f} GiB free at {folder}"
    if free < FREE_FAIL_BYTES:
        return fail(name, detail, "free some space, or use another disk")
    if free < FREE_WARN_BYTES:
        return warn(name, detail, "a larger dataset and its checkpoints may not fit: free some space, or use another disk")
    return ok(name, detail)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
