"""Would a run work here, and if not, what is the next command? Checks the machine and what its environment points to.

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
"""For all checks together, since they run side by side; S3 clients take up to 40 s to give up on an endpoint."""

FREE_FAIL_BYTES = 1 << 30

FREE_WARN_BYTES = 5 << 30
"""Below the first nothing sensible fits; below the second a dataset and a few checkpoints may not."""

RAY_FULL_DISK = 0.95
"""Share of a disk in use from which Ray refuses to spill objects to it (its local_fs_capacity_threshold)."""

RAY_STORE_SHARE = 0.3
"""Share of the memory that Ray takes for its object store by default."""

IMPORT_TIMEOUT_S = 50

SHOWN = ("prefect", "fastapi", "ray", "mlflow", "torch", "pyarrow", "numpy", "s3fs", "boto3")
"""The libraries whose versions people ask for."""

_STYLE = {"ok": "green", "warn": "yellow", "fail": "red"}


class Finding(Section):
    """The state of one thing. Its texts hold no secrets."""

    name: str
    """The thing: a library, a server, a disk."""
    status: Literal["ok", "warn", "fail"]
    """`fail`: a run would not work. `warn`: it would, until something happens."""
    detail: str
    fix: str = ""
    """The next command or edit; empty if nothing needs to be done."""


def ok(name: str, detail: str) -> Finding:
    """Make a finding that all is well."""
    return Finding(name=name, status="ok", detail=redact_text(detail))


def warn(name: str, detail: str, fix: str) -> Finding:
    """Make a finding that a run works, until something happens."""
    return Finding(name=name, status="warn", detail=redact_text(detail), fix=redact_text(fix))


def fail(name: str, detail: str, fix: str) -> Finding:
    """Make a finding that a run would not work."""
    return Finding(name=name, status="fail", detail=redact_text(detail), fix=redact_text(fix))


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
        ("prefect server", lambda: [check_prefect_server()]),
        ("torch", lambda: [check_torch()]),
        ("disk", lambda: check_disks(place)),
        ("shared memory", lambda: [check_shared_memory()]),
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
        # By themselves: Ray changes the folder of the whole process while it connects.
        findings += run_checks([("Ray nodes", lambda: check_nodes(storage, settings))], DEADLINE_S + nodes.TIMEOUT_S)
    return findings


def run_checks(checks: Sequence[Check], deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Run all checks side by side; the findings come in the order of the checks. A check that raises or hangs is a finding."""
    results: dict[int, Sequence[Finding]] = {}

    def run(index: int, name: str, check: Callable[[], Sequence[Finding]]) -> None:
        try:
            results[index] = check()
        except Exception as error:  # the doctor itself must survive whatever it meets
            results[index] = [fail(name, f"the check itself failed: {describe_error(error)}", "report this")]

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
    """Print one line per finding, its fix below it, and a sum."""
    width = max((len(finding.name) for finding in findings), default=0)
    for finding in findings:
        console.print(f"[{_STYLE[finding.status]}]{finding.status:<4}[/]  ", end="")
        console.print(f"{finding.name:<{width}}  {finding.detail}", markup=False, soft_wrap=True)
        if finding.fix:
            console.print(f"{'':<{width + 8}}-> {finding.fix}", markup=False, soft_wrap=True)
    counts = {status: sum(finding.status == status for finding in findings) for status in _STYLE}
    console.print(f"{counts['ok']} ok, {counts['warn']} to watch, {counts['fail']} in the way", markup=False)


def check_libraries() -> list[Finding]:
    """Compare the installed versions with those that penstock needs."""
    try:
        wanted = [Requirement(text) for text in requires("penstock") or []]
    except PackageNotFoundError:
        return [warn("libraries", "penstock runs from a folder without being installed", "pip install -e . -c constraints.txt")]
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


def check_prefect_server() -> Finding:
    """Import Prefect's server in a process of its own: a FastAPI that is too new breaks it, and `pip check` does not notice."""
    command, name = [sys.executable, "-c", "import prefect.server.api.server"], "prefect server"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return warn(name, f"its import takes more than {IMPORT_TIMEOUT_S} s", "try again when this machine is idle")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        versions = f"prefect {_version('prefect')} with fastapi {_version('fastapi')}"
        return fail(name, f"{versions} cannot be imported: {reason}", "in penstock's folder: pip install . -c constraints.txt")
    return ok(name, "can be imported")


def check_torch() -> Finding:
    """Name the version of torch, and whether it can use the GPU of this machine."""
    import torch  # it takes a second, and only this check needs it

    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return ok("torch", f"{torch.__version__} with {counted(len(devices), 'GPU')}: {', '.join(sorted(set(devices)))}")
    if shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0:
        cuda = torch.version.cuda
        reason = "is a build without CUDA" if cuda is None else f"(CUDA {cuda}) cannot use the driver"
        return warn(
            "torch",
            f"a GPU is here, but torch {torch.__version__} {reason}; training would run on the CPU",
            f"pip install --force-reinstall --no-deps 'torch==={torch.__version__.split('+')[0]}', or update the driver",
        )
    return ok("torch", f"{torch.__version__} on {counted(psutil.cpu_count() or 1, 'CPU')}; no GPU")


def check_disks(storage: str) -> list[Finding]:
    """Check the free space for state and prepared data at the local path `storage`, and where Ray spills."""
    folder = existing_folder(Path(storage.removeprefix("file://")).expanduser().absolute())
    temporary, name = Path(tempfile.gettempdir()), "disk of temporary files"
    usage = shutil.disk_usage(temporary)
    used = 1 - usage.free / usage.total
    if used <= RAY_FULL_DISK:
        return [_free_space("disk of the storage", folder), _free_space(name, temporary)]
    full = f"{temporary} is {used:.0%} full; Ray spills nothing to a disk that is more than {RAY_FULL_DISK:.0%} full"
    return [
        _free_space("disk of the storage", folder),
        fail(name, full, "free some space, or set TMPDIR to a folder on another disk"),
    ]


def check_shared_memory(folder: Path = Path("/dev/shm"), memory_bytes: int | None = None) -> Finding:
    """Check that Ray's object store fits into shared memory; a container's has 64 MB by default."""
    name = "shared memory"
    if not folder.is_dir():
        return ok(name, f"this system has no {folder}; Ray's object store uses the temporary folder")
    total = psutil.virtual_memory().total if memory_bytes is None else memory_bytes
    wanted, free = int(total * RAY_STORE_SHARE), shutil.disk_usage(folder).free
    detail = f"{_gib(free)} free in {folder}; Ray's object store takes {_gib(wanted)} by default"
    if free >= wanted:
        return ok(name, detail)
    return warn(name, f"{detail}: it would lie on a disk and be slow", f"docker run --shm-size={_gib(wanted, '')}g")


def check_prefect(environ: Mapping[str, str]) -> Finding:
    """Ask the Prefect API for its health, then for something that needs the login."""
    name, url = "PREFECT_API_URL", environ.get("PREFECT_API_URL", "").rstrip("/")
    if not url:
        return ok(name, "not set: every run starts its own server")
    login = _login(environ.get("PREFECT_API_KEY"), environ.get("PREFECT_API_AUTH_STRING"))
    trouble = prefect_trouble(url) or login_trouble(
        f"{url}/admin/version", login, "set PREFECT_API_AUTH_STRING or PREFECT_API_KEY"
    )
    return _server(name, url, trouble)


def check_mlflow(environ: Mapping[str, str]) -> Finding:
    """Ask an MLflow server for its health, then for something that needs the login; other stores are only named."""
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
    """Check that driver and cluster can agree: both sides need the same RAY_AUTH_MODE, and the same token."""
    name, mode = "RAY_AUTH_MODE", environ.get("RAY_AUTH_MODE", "")
    remote, given = ray_address(environ) is not None, environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(given or (home or Path(os.path.expanduser("~"))) / ".ray" / "auth_token")
    has_token = bool(environ.get("RAY_AUTH_TOKEN")) or path.is_file()
    if mode not in ("", "token", "disabled"):
        return fail(name, f"{mode!r} is not a valid mode (token, disabled)", "set it to the same on every node and here")
    if mode == "token" and not has_token:
        return fail(name, f"token, but RAY_AUTH_TOKEN is not set and {path} is not there", "copy the cluster's token to it")
    if given and not has_token:
        return fail(name, f"RAY_AUTH_TOKEN_PATH names {path}, which is not there", "correct the path")
    if remote and not mode:
        detail = "not set, but RAY_ADDRESS names a cluster; whether the token is sent depends on Ray's default"
        return warn(name, detail, "set RAY_AUTH_MODE to what the cluster was started with (token or disabled)")
    if remote and mode == "disabled":
        detail = "disabled: any process that reaches the cluster's ports can run code on it"
        return warn(name, detail, "set RAY_AUTH_MODE=token on every node and here, or keep the ports in a private network")
    return ok(name, f"{mode or 'not set'}; {'a token is here' if has_token else 'no token'}")


def check_storage(storage: Storage, environ: Mapping[str, str]) -> list[Finding]:
    """Put, list, get and delete one small object, then check whether the store can put only where nothing is."""
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
        why = failure.error
        reason, fix = (
            (why.message, why.next_step) if isinstance(why, ServiceError) else (_with_cause(why), _storage_fix(storage))
        )
        return [fail(name, f"an object cannot be {failure.verb}: {reason}", fix)]
    took_ms = (time.monotonic() - started) * 1000
    findings = [ok(name, f"an object was written, listed, read and deleted in {took_ms:.0f} ms")]
    return findings if storage.is_local else [*findings, _conditional_put(storage)]


def _conditional_put(storage: Storage) -> Finding:
    """Check that a second writer is kept from an object that is there, by its content instead of the store's answer."""
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
        return ok(name, "the store refuses to create what is there: two runs cannot take the same lease")
    return warn(name, "the store overwrites what should only be created: leases rely on reading back what was written", careful)


def _server(name: str, url: str, trouble: Trouble | None) -> Finding:
    return ok(name, f"{url} answers") if trouble is None else fail(name, f"{url} {trouble.what}", trouble.fix)


def _login(token: str | None, user_and_password: str | None) -> dict[str, str]:
    if token:
        return {"Authorization": f"Bearer {token}"}
    return basic_login(user_and_password) if user_and_password else {}


def _with_cause(error: BaseException) -> str:
    """Describe the error and its first cause: clients of object stores wrap errors that say more."""
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
    return "check the URL and the credentials that its fsspec filesystem wants"


def _free_space(name: str, folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    detail = f"{_gib(free)} free at {folder}"
    if free < FREE_FAIL_BYTES:
        return fail(name, detail, "free some space, or use another disk")
    if free < FREE_WARN_BYTES:
        return warn(name, detail, "a larger dataset and its checkpoints may not fit: free some space, or use another disk")
    return ok(name, detail)


def _gib(size_bytes: int, unit: str = " GiB") -> str:
    return f"{size_bytes / (1 << 30):.0f}{unit}" if size_bytes >= 10 << 30 else f"{size_bytes / (1 << 30):.1f}{unit}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
