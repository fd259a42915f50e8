"""Is this machine fit: interpreter, libraries, GPU, disks, shared memory, and what the libraries would send home?"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from penstock.flows.servers.probes import TELEMETRY_OFF
from penstock.flows.verbs.doctor.finding import Finding, fail, ok, warn
from penstock.messages import counted
from penstock.storage import existing_folder

__all__ = [
    "check_disks",
    "check_libraries",
    "check_prefect_server",
    "check_python",
    "check_shared_memory",
    "check_telemetry",
    "check_torch",
]


FREE_FAIL_BYTES = 1 << 30

FREE_WARN_BYTES = 5 << 30
"""Below the first nothing sensible fits; below the second a dataset and a few checkpoints may not."""

RAY_FULL_DISK = 0.95
"""Share of a disk in use from which Ray refuses to spill objects to it (its local_fs_capacity_threshold)."""

RAY_STORE_SHARE = 0.3
"""Share of the memory that Ray takes for its object store unless told otherwise."""

IMPORT_TIMEOUT_S = 50

SHOWN = ("prefect", "fastapi", "ray", "mlflow", "torch", "pyarrow", "numpy", "s3fs", "boto3")
"""The libraries whose versions people ask for."""


def check_python() -> Finding:
    """Whether this interpreter is one that penstock is tested with."""
    found = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return fail("python", f"{found}; penstock needs 3.11 to 3.13", "make a new environment with one of these")
    return ok("python", f"{found} at {sys.executable}")


def check_libraries() -> list[Finding]:
    """Compare what is installed with what penstock asks for; a broken pin is named with both versions."""
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
    if not findings:
        findings.append(ok("libraries", ", ".join(f"{name} {_version(name)}" for name in SHOWN)))
    return findings


def check_prefect_server() -> Finding:
    """Import Prefect's server in a process of its own: a FastAPI that is too new breaks it, and `pip check` does not notice."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import prefect.server.api.server"],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return warn("prefect server", f"its import takes more than {IMPORT_TIMEOUT_S} s", "try again when this machine is idle")
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        versions = f"prefect {_version('prefect')} with fastapi {_version('fastapi')}"
        fix = "in penstock's folder: pip install . -c constraints.txt"
        return fail("prefect server", f"{versions} cannot be imported: {said}", fix)
    return ok("prefect server", "can be imported")


def check_torch() -> Finding:
    """Which torch, and whether it can use the GPU that is here."""
    import torch  # here, because it takes a second and only this check needs it

    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return ok("torch", f"{torch.__version__} with {len(devices)} GPU: {', '.join(sorted(set(devices)))}")
    if shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0:
        reason = (
            "is a build without CUDA" if torch.version.cuda is None else f"(CUDA {torch.version.cuda}) cannot use the driver"
        )
        return warn(
            "torch",
            f"a GPU is here, but torch {torch.__version__} {reason}; training would run on the CPU",
            f"pip install --force-reinstall --no-deps 'torch==={torch.__version__.split('+')[0]}', or update the driver",
        )
    return ok("torch", f"{torch.__version__} on {counted(psutil.cpu_count() or 1, 'CPU')}; no GPU")


def check_disks(storage: str) -> list[Finding]:
    """Free space where state and prepared data go, and where Ray spills.

    Args:
        storage: a local path; the first folder above it that exists is looked at.
    """
    folder = existing_folder(Path(storage.removeprefix("file://")).expanduser().absolute())
    temporary = Path(tempfile.gettempdir())
    findings = [_free_space("disk of the storage", folder)]
    usage = shutil.disk_usage(temporary)
    used = 1 - usage.free / usage.total
    if used > RAY_FULL_DISK:
        findings.append(
            fail(
                "disk of temporary files",
                f"{temporary} is {used:.0%} full; Ray spills nothing to a disk that is more than {RAY_FULL_DISK:.0%} full",
                "free some space, or set TMPDIR to a folder on another disk",
            )
        )
    else:
        findings.append(_free_space("disk of temporary files", temporary))
    return findings


def check_shared_memory(folder: Path = Path("/dev/shm"), memory_bytes: int | None = None) -> Finding:
    """Whether Ray's object store fits into shared memory; a container's has 64 MB unless told otherwise."""
    if not folder.is_dir():
        return ok("shared memory", f"this system has no {folder}; Ray's object store uses the temporary folder")
    total = psutil.virtual_memory().total if memory_bytes is None else memory_bytes
    wanted, free = int(total * RAY_STORE_SHARE), shutil.disk_usage(folder).free
    detail = f"{_gib(free)} free in {folder}; Ray's object store takes {_gib(wanted)} by default"
    if free < wanted:
        return warn(
            "shared memory", f"{detail}: it would lie on a disk and be slow", f"docker run --shm-size={_gib(wanted, '')}g"
        )
    return ok("shared memory", detail)


def check_telemetry(environ: Mapping[str, str]) -> Finding:
    """Whose usage statistics are off. penstock turns them off in what it starts; a server of yours has its own settings."""
    off = {"0", "false", "no", "off"}
    on = {"1", "true", "yes", "on"}
    get = {name: value.strip().lower() for name, value in environ.items()}.get
    silenced = {
        "Prefect": get("PREFECT_SERVER_ANALYTICS_ENABLED") in off and get("DO_NOT_TRACK") in on,
        "MLflow": get("MLFLOW_DISABLE_TELEMETRY") in on or get("DO_NOT_TRACK") == "true",
        "Ray": get("RAY_USAGE_STATS_ENABLED") in off,
    }
    left = [name for name, silent in silenced.items() if not silent]
    if not left:
        return ok("telemetry", "off for Prefect, MLflow and Ray")
    return ok(
        "telemetry",
        f"off in what penstock starts; {', '.join(left)} started by other means from this shell would send usage statistics, "
        f"unless {' '.join(f'{name}={value}' for name, value in TELEMETRY_OFF.items())}",
    )


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
