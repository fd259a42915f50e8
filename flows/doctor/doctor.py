"""Would a run work on this machine, with the servers that its environment names? Asks them as a run does."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement

from penstock.errors import PenstockError
from penstock.flows.servers.probes import mlflow_trouble, prefect_trouble, ray_address, ray_refusal, storage_failure
from penstock.messages import counted, describe_error
from penstock.redact import redact_text
from penstock.storage import Storage, existing_folder
from penstock.stores import is_local

__all__ = ["Finding", "diagnose"]

FREE_BYTES = 5 << 30
"""With less free space a dataset and its checkpoints may not fit."""

SHOWN = ("prefect", "ray", "mlflow", "torch", "pyarrow", "numpy")
"""Libraries with versions that are shown."""


class Finding(NamedTuple):
    """The state of the libraries, a server or a disk, without secrets.

    Attributes:
        status: `fail`: a run would not work; `warn`: it may fail later.
        fix: the next command or edit; empty if nothing is to be done.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


def diagnose(storage_uri: str | None) -> Iterator[Finding]:
    """Check what a run would need, one thing after the other.

    Args:
        storage_uri: a storage to write to and read from as well; None checks the disk of the current folder.
    """
    yield _libraries()
    yield _torch()
    yield _disk("." if storage_uri is None or not is_local(storage_uri) else storage_uri)
    prefect, mlflow, ray = (os.environ.get(name, "") for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "RAY_ADDRESS"))
    trouble = prefect_trouble(prefect) if prefect else None
    yield _server("PREFECT_API_URL", prefect, trouble, "every run starts its own server")
    trouble = mlflow_trouble(mlflow) if mlflow.startswith("http") else None
    yield _server("MLFLOW_TRACKING_URI", mlflow, trouble, "runs are kept in SQLite beside the pipeline file")
    refusal = ray_refusal(ray) if ray_address() is not None else None
    fix = "start the cluster (ray start --head), correct RAY_ADDRESS (host:6379), or unset it"
    yield _server("RAY_ADDRESS", ray, (refusal, fix) if refusal else None, "every run starts its own Ray")
    if storage_uri is not None:
        yield _storage(Storage(storage_uri))


def _libraries() -> Finding:
    name = "libraries"
    try:
        wanted = [Requirement(text) for text in requires("penstock") or []]
    except PackageNotFoundError:
        return Finding(name, "warn", "penstock is not installed; it runs from a folder", "pip install -e . -c constraints.txt")
    wrong = [
        f"{each.name}{each.specifier}"
        for each in wanted
        if (each.marker is None or each.marker.evaluate({"extra": ""}))
        and not each.specifier.contains(_version(each.name), prereleases=True)
    ]
    if wrong:
        quoted = " ".join(f'"{each}"' for each in wrong)
        return Finding(name, "fail", f"not installed as needed: {', '.join(wrong)}", f"pip install {quoted} -c constraints.txt")
    python = f"Python {sys.version.split()[0]} at {sys.executable}"
    return Finding(name, "ok", ", ".join([python, *(f"{each} {_version(each)}" for each in SHOWN)]))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "0"


def _torch() -> Finding:
    import torch  # it takes a second, and only this check needs it

    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
        return Finding("torch", "ok", f"{counted(torch.cuda.device_count(), 'GPU')}: {', '.join(names)}")
    if shutil.which("nvidia-smi") is None:
        return Finding("torch", "ok", f"{counted(os.cpu_count() or 1, 'CPU')}, no GPU")
    why = "is a build without CUDA" if torch.version.cuda is None else f"(CUDA {torch.version.cuda}) cannot use the driver"
    detail = f"this machine has a GPU, but torch {torch.__version__} {why}: training would run on the CPU"
    return Finding("torch", "warn", detail, "install the build of torch for this driver, or update the driver")


def _disk(place: str) -> Finding:
    folder = existing_folder(Path(place.removeprefix("file://")).expanduser().absolute())
    free = shutil.disk_usage(folder).free
    detail = f"{free / (1 << 30):,.1f} GiB free at {folder}"
    few = "a larger dataset and its checkpoints may not fit: free some space, or use another disk"
    return Finding("disk", "ok", detail) if free >= FREE_BYTES else Finding("disk", "warn", detail, few)


def _server(name: str, address: str, trouble: tuple[str, str] | None, without: str) -> Finding:
    if not address:
        return Finding(name, "ok", f"not set: {without}")
    shown = redact_text(address)
    return Finding(name, "ok", shown) if trouble is None else Finding(name, "fail", f"{shown} {trouble[0]}", trouble[1])


def _storage(storage: Storage) -> Finding:
    name = f"storage {redact_text(storage.root)}"
    try:
        storage.refuse_file()
        failure = storage_failure(storage)
    except PenstockError as error:
        return Finding(name, "fail", error.message, error.next_step)
    if failure is None:
        return Finding(name, "ok", "an object was written, listed, read and deleted")
    if isinstance(failure.error, PenstockError):
        return Finding(name, "fail", f"an object cannot be {failure.verb}: {failure.error.message}", failure.error.next_step)
    why = f"an object cannot be {failure.verb}: {describe_error(failure.error)}"
    return Finding(name, "fail", why, "correct the address, the credentials or the rights, and run the same command")
