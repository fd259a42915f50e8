"""Where on this node does a shard lie, ready to be mapped?

A shard of a local storage is mapped where it is. One of a remote storage is fetched once per node, by whichever process comes
first, into a folder of files named by their content: two datasets that share a shard share the file.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ingest.dataset import ShardInfo
from penstock.digest import file_digest
from penstock.errors import DataError, PenstockError, ServiceError
from penstock.storage import Storage

__all__ = ["cache_directory", "local_shard"]

FETCH_TRIES = 3
"""A download cut short or damaged on its way is repeated this often before the shard itself is blamed."""

_REBUILD = "run the pipeline again: the materialize stage finds damaged shards and rebuilds those alone"


def cache_directory() -> Path:
    """The node's folder for fetched shards: PENSTOCK_CACHE_DIR, or one in the home folder."""
    return Path(os.environ.get("PENSTOCK_CACHE_DIR") or Path.home() / ".cache" / "penstock" / "shards")


def local_shard(storage: Storage, shard: ShardInfo, cache: Path | None = None) -> Path:
    """Give a path on this machine at which `shard` lies whole, fetching it first if need be.

    Args:
        cache: folder for shards of a remote storage; None takes `cache_directory()`.

    Raises:
        DataError: the shard is missing, has another size than the manifest says, or another content after a fetch.
        ServiceError: the storage does not deliver it.
    """
    if storage.is_local:
        path = storage.local_path(shard.path)
        if not path.is_file():
            raise DataError(f"shard {path} is missing; its dataset lists {shard.rows} rows in it", next_step=_REBUILD)
        _check_size(path, shard, str(path))
        return path
    folder = (cache or cache_directory()) / shard.digest[:2]
    target = folder / f"{shard.digest}.arrow"
    if _is_whole(target, shard):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f"{shard.digest}.lock"):
        if not _is_whole(target, shard):  # another process may have fetched it while this one waited
            _fetch(storage, shard, target)
    return target


def _is_whole(path: Path, shard: ShardInfo) -> bool:
    try:
        return path.stat().st_size == shard.size_bytes
    except FileNotFoundError:
        return False


def _check_size(path: Path, shard: ShardInfo, name: str) -> None:
    size = path.stat().st_size
    if size != shard.size_bytes:
        raise DataError(f"shard {name} has {size} bytes where its manifest says {shard.size_bytes}", next_step=_REBUILD)


def _fetch(storage: Storage, shard: ShardInfo, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    uri = storage.uri(shard.path)
    failure: PenstockError | None = None
    try:
        for _ in range(FETCH_TRIES):
            try:
                storage.get_file(shard.path, temporary)
                _check_size(temporary, shard, uri)
                if file_digest(temporary) != shard.digest:
                    raise DataError(
                        f"shard {uri} has another content than its manifest's digest {shard.digest}", next_step=_REBUILD
                    )
            except FileNotFoundError as error:
                raise DataError(
                    f"shard {uri} is missing; its dataset lists {shard.rows} rows in it", next_step=_REBUILD
                ) from error
            except DataError as error:
                failure = error
            except OSError as error:
                failure = ServiceError(f"shard {uri} cannot be fetched: {error}", next_step="check the storage's endpoint")
                failure.__cause__ = error
            else:
                os.replace(temporary, target)
                return
        assert failure is not None
        raise failure
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between the processes of this node; a process that dies lets go."""
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
