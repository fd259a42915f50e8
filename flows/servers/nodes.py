"""Can every node of a Ray cluster do its part? Each is asked by a task of its own, all at once, before anything is spent.

A node has a disk, keys, libraries and a network of its own. What one lacks would otherwise show in the midst of a run, or only
after all of the training, where `storage` is a folder that each machine has for itself. The nodes import this file: it loads
neither torch nor Ray.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import Interrupted, PenstockError, ServiceError
from penstock.flows.servers.probes import storage_failure
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import open_input, probe_endpoint, read_problem
from penstock.machine.cache_dir import cache_folder
from penstock.storage import Storage
from penstock.stores import is_local

__all__ = ["ABSENT", "ANSWER_S", "NodeNeeds", "NodeTrouble", "ask_nodes", "installed_versions", "what_is_missing"]

ANSWER_S = 45.0
"""For all nodes together. A first process that starts from a slow disk takes 20 s; Ray calls a silent node dead after 65."""

FREE_BYTES = 256 << 20
"""What the disk must have that a node writes to."""

ABSENT = "absent"

_SHARE_STORAGE = "set `storage` to s3:// or to a folder that every node mounts under the same path"

_SHARE_DATA = "put the data into s3:// or into a folder that every node mounts under the same path"

_GIVE_KEYS = (
    "give that node what it needs to reach the store, for keys do not travel with a run: AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY in the environment of its `ray start`, or a role of the machine"
)

_SAME_VERSIONS = "install on that node the versions that are here, or run where they are the same"


class NodeTrouble(NamedTuple):
    """What keeps a node from doing its part."""

    node: str
    """Host name and address."""
    what: str
    fix: str


@dataclass(frozen=True)
class NodeNeeds:
    """What a node is asked."""

    storage: Storage | None
    token: str
    content: bytes
    """What this process has written to `token` in the storage."""
    files: Sequence[tuple[str, int]] = ()
    """(URI, bytes) of source files that it must be able to read."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Distribution -> version here. penstock itself travels along."""


def installed_versions(more: Iterable[str] = ()) -> dict[str, str]:
    """Version here, by name, of the libraries that prepare rows and train on them, and of those named."""
    return {name: _installed(name) for name in ("python", "pyarrow", "numpy", "pillow", "simplejpeg", "torch", *more)}


def ask_nodes(storage: Storage | None, versions: Mapping[str, str], files: Sequence[SourceFile] = ()) -> list[NodeTrouble]:
    """Ask all nodes that can run tasks, at once; returns what keeps them from it. Takes `ANSWER_S` at most."""
    # Ray takes a second to import, and commands that need no cluster do without.
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    token, sizes = f".probe-{uuid.uuid4().hex[:8]}", [(file.uri, file.size_bytes) for file in files]
    needs = NodeNeeds(storage, token, os.urandom(16), sizes, versions)
    task = ray.remote(what_is_missing)

    def ask(node: Mapping[str, Any]) -> Any:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        # It takes no CPU: a cluster that is busy answers, too.
        return task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(needs)

    try:
        if storage is not None:
            storage.write_bytes(f"{needs.token}/token", needs.content)
        asked = {ask(node): node for node in _working_nodes()}
        if asked:
            ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        answers = [(node, _answer(reference)) for reference, node in asked.items()]
    finally:
        if storage is not None:
            with contextlib.suppress(OSError, ServiceError):  # the nodes have answered: a few bytes that stay end no run
                storage.delete(needs.token)
    # One that has left meanwhile is not needed.
    alive = {node["NodeID"] for node in _working_nodes()}
    return [
        NodeTrouble(f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})", what, fix)
        for node, answer in answers
        for what, fix in answer
        if node["NodeID"] in alive
    ]


def _working_nodes() -> list[dict[str, Any]]:
    """Those that get tasks and workers: a head node that gives no CPU gets none."""
    import ray

    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]


def _answer(reference: Any) -> list[tuple[str, str]]:
    """What a node has said; that it has not, or cannot, is an answer too."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        found: list[tuple[str, str]] = ray.get(reference, timeout=0)
    except GetTimeoutError:
        return [(f"has not answered within {ANSWER_S:g} s", "look after that node, or take it out: `ray stop` there")]
    except RayError as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return [(f"cannot run a task of ours: {said}", "install what penstock needs on that node; its logs are in /tmp/ray")]
    return found


def what_is_missing(needs: NodeNeeds) -> list[tuple[str, str]]:
    """NodeNeeds around on a node: (what is wrong, what to do) of everything that is. Runs in a Ray task."""
    found = [
        (f"has {name} {there}; here it is {here}", _SAME_VERSIONS)
        for name, here in needs.versions.items()
        if _public(there := _installed(name)) != _public(here)
    ]
    if needs.storage is not None:
        found += _look_at_storage(needs.storage, needs) or _look_for_room(needs.storage)
    for uri, size_bytes in needs.files:
        found += _look_at_file(uri, size_bytes)
    return found


def _look_at_storage(storage: Storage, needs: NodeNeeds) -> list[tuple[str, str]]:
    try:
        probe_endpoint(storage.root)
        if storage.read_bytes(f"{needs.token}/token") == needs.content:
            failure = storage_failure(storage)
            return [] if failure is None else [_refused(f"storage {storage.root} cannot be {failure.verb}", failure.error)]
    except FileNotFoundError:
        pass
    except (OSError, PenstockError) as error:
        return [_refused(f"storage {storage.root} cannot be read", error)]
    if storage.is_local:
        return [(f"does not see storage {storage.root}, which is a folder of the machine this command runs on", _SHARE_STORAGE)]
    return [(f"reaches another store as {storage.root}: what is written here is not there", _GIVE_KEYS)]


def _look_at_file(uri: str, size_bytes: int) -> list[tuple[str, str]]:
    fix = _SHARE_DATA if is_local(uri) else _GIVE_KEYS
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


def _look_for_room(storage: Storage) -> list[tuple[str, str]]:
    """Where a node writes: to the storage; for a remote one into its cache of shards, by way of the temporary folder."""
    found = []
    for folder in [Path(storage.root)] if storage.is_local else [cache_folder(), Path(tempfile.gettempdir())]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            found.append((f"cannot write to {folder}: {error.strerror or error}", "point PENSTOCK_CACHE_DIR to another folder"))
            continue
        free = shutil.disk_usage(folder).free
        if free < FREE_BYTES:
            found.append(
                (
                    f"has {free / 1e6:,.0f} MB free in {folder}; {FREE_BYTES / 1e6:,.0f} MB must be",
                    "free some space on that node",
                )
            )
    return found


def _refused(what: str, error: Exception) -> tuple[str, str]:
    if isinstance(error, PenstockError):
        return f"{what}: {error.message}", _GIVE_KEYS
    return f"{what}: {getattr(error, 'strerror', None) or error}", "let that node write to the storage, and read the sources"


def _installed(distribution: str) -> str:
    if distribution == "python":
        return ".".join(platform.python_version_tuple()[:2])
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ABSENT


def _public(found: str) -> str:
    """Without the part that names a build: the driver's torch may be one for CPUs, the nodes' one for GPUs."""
    return found.partition("+")[0]
