"""Can every node of a Ray cluster do its part? A task on each checks storage, sources, libraries and disk before a run.

The nodes import this file: it loads neither torch nor Ray.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import Interrupted, PenstockError, PreflightError, ServiceError
from penstock.flows.servers.probes import storage_failure
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import open_input, probe_endpoint, read_problem
from penstock.installed import version_of
from penstock.machine.cache_dir import cache_folder
from penstock.messages import capped, counted
from penstock.progress import announce_wait
from penstock.storage import Storage
from penstock.stores import is_local

if TYPE_CHECKING:
    from penstock.flows.servers.ray_local import RayCluster

__all__ = ["NodeNeeds", "check_node", "check_nodes", "installed_versions", "refuse_unfit_nodes"]

TIMEOUT_S = 900.0
"""For all nodes together: a busy node may take minutes to start a process. Ray calls a silent node dead after about 65 s."""

FREE_BYTES = 256 << 20
"""What the disk must have that a node writes to."""

_SHARE = "{} s3:// or {} a folder that every node mounts under the same path"

_GIVE_KEYS = (
    "give that node what it needs to reach the store, for keys do not travel with a run: AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY in the environment of its `ray start`, or a role of the machine"
)

_SAME_VERSIONS = "install on that node the versions that are here, or run where they are the same"


@dataclass(frozen=True)
class NodeNeeds:
    """What a node is checked for."""

    storage: Storage
    token: str
    content: bytes
    """Of the file that the driver has written to the folder `token` of the storage."""
    files: Sequence[tuple[str, int]] = ()
    """(URI, bytes) of source files that it must be able to read."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Distribution -> version on the driver. penstock itself travels along."""


def installed_versions(more: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions here of the libraries that prepare rows and train, and of those in `more` ("absent" if not there)."""
    return {name: _installed(name) for name in ("python", "pyarrow", "numpy", "pillow", "simplejpeg", "torch", *more)}


def refuse_unfit_nodes(
    cluster: RayCluster, storage: Storage, versions: Mapping[str, str], files: Sequence[SourceFile] = ()
) -> None:
    """Check that every node reaches the storage, can read `files` and has the same versions.

    Raises:
        PreflightError: nodes cannot do their part; lists each problem once, with its nodes.
    """
    problems = check_nodes(storage, versions, files)
    if problems:
        count = len({node for names in problems.values() for node in names})
        raise PreflightError(
            f"{counted(count, 'node')} of the Ray cluster {cluster.address} cannot take part in this run",
            problems=[f"{', '.join(capped(names, 5))}: {what}" for (what, _), names in problems.items()],
            next_step="; ".join(dict.fromkeys(fix for _, fix in problems)),
        )


def check_nodes(
    storage: Storage, versions: Mapping[str, str], files: Sequence[SourceFile] = ()
) -> dict[tuple[str, str], list[str]]:
    """Check all nodes that can run tasks, at once; return each (problem, fix) with the names of its nodes.

    Takes `TIMEOUT_S` at most.
    """
    # Ray takes a second to import, and commands that need no cluster do without.
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    token, sizes = f".probe-{uuid.uuid4().hex[:8]}", [(file.uri, file.size_bytes) for file in files]
    needs = NodeNeeds(storage, token, os.urandom(16), sizes, versions)
    task, found = ray.remote(check_node), dict[str, list[tuple[str, str]]]()

    def start(node_id: str) -> Any:
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        # It takes no CPU: a busy cluster answers, too.
        return task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(needs)

    try:
        storage.write_bytes(f"{token}/token", needs.content)
        tasks = {(node_id, name): start(node_id) for node_id, name in _working_nodes().items()}
        end_s = time.monotonic() + TIMEOUT_S
        for (node_id, name), reference in tasks.items():
            with announce_wait(f"{name} to start a process"):
                found[node_id] = _answer(reference, end_s)
    finally:
        with contextlib.suppress(OSError, ServiceError):  # the nodes have answered: a few bytes that stay end no run
            storage.delete(token)
    problems: dict[tuple[str, str], list[str]] = {}
    for node_id, name in _working_nodes().items():  # one that has left meanwhile is not needed
        for problem in found.get(node_id, ()):
            problems.setdefault(problem, []).append(name)
    return problems


def _working_nodes() -> dict[str, str]:
    """Return Ray's id and the name of each node that gets tasks and workers: a head node that gives no CPU gets none."""
    import ray

    return {
        node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU")
    }


def _answer(reference: Any, end_s: float) -> list[tuple[str, str]]:
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        found: list[tuple[str, str]] = ray.get(reference, timeout=max(0.0, end_s - time.monotonic()))
    except GetTimeoutError:
        return [(f"has not answered within {TIMEOUT_S:g} s", "look at the load of that node; the same command asks it again")]
    except RayError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return [(f"cannot run a task of ours: {reason}", "install what penstock needs on that node; its logs are in /tmp/ray")]
    return found


def check_node(needs: NodeNeeds) -> list[tuple[str, str]]:
    """Check the node that this task runs on; return (problem, fix) pairs."""
    found = []
    for name, here in needs.versions.items():
        there = _installed(name)
        if _without_build(there) != _without_build(here):
            found.append((f"has {name} {there}; here it is {here}", _SAME_VERSIONS))
    found += _check_storage(needs.storage, needs) or _check_disk(needs.storage)
    for uri, size_bytes in needs.files:
        found += _check_file(uri, size_bytes)
    return found


def _check_storage(storage: Storage, needs: NodeNeeds) -> list[tuple[str, str]]:
    try:
        probe_endpoint(storage.root)
        content = storage.read_bytes(f"{needs.token}/token")
    except FileNotFoundError:
        content = None
    except (OSError, PenstockError) as error:
        return [_refused(f"storage {storage.root} cannot be read", error)]
    if content == needs.content:
        failure = storage_failure(storage)
        return [] if failure is None else [_refused(f"storage {storage.root} cannot be {failure.verb}", failure.error)]
    if storage.is_local:
        what = f"does not see storage {storage.root}, which is a folder of the machine this command runs on"
        return [(what, _SHARE.format("set `storage` to", "to"))]
    return [(f"reaches another store as {storage.root}: what is written here is not there", _GIVE_KEYS)]


def _check_file(uri: str, size_bytes: int) -> list[tuple[str, str]]:
    fix = _SHARE.format("put the data into", "into") if is_local(uri) else _GIVE_KEYS
    try:
        probe_endpoint(uri)
        with open_input(uri) as file:
            there = file.size()
    except FileNotFoundError:
        return [(f"does not see {uri}, which this command reads", fix)]
    except Interrupted:
        raise
    except Exception as error:  # every store has errors of its own
        return [_refused(f"cannot read {uri}", read_problem(uri, error))]
    return [] if there == size_bytes else [(f"sees another file as {uri}: it has {there:,} bytes, here {size_bytes:,}", fix)]


def _check_disk(storage: Storage) -> list[tuple[str, str]]:
    """Check the folders that a node writes to: the storage; of a remote one its cache of shards and the temporary folder."""
    found = []
    for folder in [Path(storage.root)] if storage.is_local else [cache_folder(), Path(tempfile.gettempdir())]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            free = shutil.disk_usage(folder).free
        except OSError as error:
            found.append((f"cannot write to {folder}: {error.strerror or error}", "point PENSTOCK_CACHE_DIR to another folder"))
            continue
        if free < FREE_BYTES:
            what = f"has {free / 1e6:,.0f} MB free in {folder}; {FREE_BYTES / 1e6:,.0f} MB must be"
            found.append((what, "free some space on that node"))
    return found


def _refused(what: str, error: Exception) -> tuple[str, str]:
    if isinstance(error, PenstockError):
        return f"{what}: {error.message}", _GIVE_KEYS
    return f"{what}: {getattr(error, 'strerror', None) or error}", "let that node write to the storage, and read the sources"


def _installed(distribution: str) -> str:
    if distribution == "python":
        return ".".join(platform.python_version_tuple()[:2])
    return version_of(distribution)


def _without_build(found: str) -> str:
    """Strip the build: the driver's torch may be one for CPUs, the nodes' one for GPUs."""
    return found.partition("+")[0]
