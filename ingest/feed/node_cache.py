"""How do shards come to this node's disk, where they can be mapped?

A shard of a local storage is mapped in place. A shard of a remote storage is fetched once per node, by the first process that
needs it, into a folder of files named by their content: datasets, runs and trials share the files of equal shards.

A byte budget bounds the folder. Shards that were not used for longest are evicted first, but never a mapped one: a reader holds
a shared lock on the file, which ends with its process. A file gets its name once it is whole, checked against its hash, and on
disk, and is checked again after a change. A killed process leaves an unlocked `.part`, which the next fetch removes. The bytes
of all shards are kept in a file: each process searches the folder once, and when there is no room.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from penstock.digest import file_digest
from penstock.errors import PenstockError, PreflightError, ServiceError, ShardError
from penstock.ingest.feed.pending import await_shard
from penstock.ingest.files.content_digests import content_digests, remember_digests
from penstock.ingest.manifest import UNIT_RECORD, ShardInfo, unit_path
from penstock.ingest.phases import count_fetched
from penstock.machine.cache_dir import cache_folder, configured_budget, kept_free
from penstock.storage import NO_ROOM, Storage

__all__ = ["LocalShard", "NodeCache", "allow_open_files", "hold_shard"]

FETCH_TRIES = 3
"""Downloads of a shard before it counts as damaged in the store."""

_EVICTED_SHARE = 64
"""This part of the budget is evicted beside the needed bytes, so that a full cache is not searched for every shard."""

_counted: set[Path] = set()
"""Folders whose bytes this process has counted."""

_OTHER_FILES = 512
"""Files and connections that a process has open besides shards."""


class LocalShard:
    """A shard on this machine's disk. It is not evicted while this object lives: keep the object while the file is mapped."""

    def __init__(self, path: Path, lock: IO[bytes] | None = None) -> None:
        self.path = path
        if lock is not None:
            weakref.finalize(self, lock.close)


def hold_shard(storage: Storage, shard: ShardInfo) -> LocalShard:
    """Hold `shard` on this machine; wait until it is made, and fetch it into the node's cache, if needed.

    Raises:
        DataError: it was made otherwise than expected (penstock.ingest.feed.pending).
        ShardError: the shard is missing, has another size than in the manifest, or another content after a fetch.
        ServiceError: the storage does not deliver it.
        PreflightError: the cache has no room beside the shards that are being read.
    """
    if shard.is_pending:
        shard = await_shard(storage, shard)
    if not storage.is_local:
        return NodeCache().hold(storage, shard)
    path = storage.local_path(shard.path)
    if not path.is_file():
        raise _missing(shard, str(path))
    _check_size(path, shard, str(path))
    return LocalShard(path)


class NodeCache:
    """Shards of remote storages on this node's disk. Any number of objects and processes may use one folder at once.

    Args:
        folder: None takes PENSTOCK_CACHE_DIR, or a folder in the home folder.
        budget_bytes: of all files together; None takes PENSTOCK_CACHE_BYTES (such as `200GB`), or the disk but a tenth of it
            (`kept_free`).

    Raises:
        SpecError: PENSTOCK_CACHE_BYTES is not a size.
    """

    def __init__(self, folder: Path | None = None, budget_bytes: int | None = None) -> None:
        self.folder = folder or cache_folder()
        self._parts, self._record = self.folder / "parts", self.folder / "bytes"
        self._budget = configured_budget() if budget_bytes is None else budget_bytes

    @property
    def budget_bytes(self) -> int:
        """Most bytes of all shards in the folder."""
        if self._budget is not None:
            return self._budget
        self.folder.mkdir(parents=True, exist_ok=True)
        return self._budget_of(self._used())

    def _budget_of(self, used: int) -> int:
        if self._budget is not None:
            return self._budget
        disk = shutil.disk_usage(self.folder)
        room = max(0, used + disk.free - self._unwritten())
        return room - kept_free(disk.total, room)

    def hold(self, storage: Storage, shard: ShardInfo) -> LocalShard:
        """Hold a shard of a remote storage, as `hold_shard`. One file stays open for as long as it is held.

        Raises:
            ShardError, ServiceError, PreflightError: as `hold_shard`; or the folder of the cache cannot be written to.
        """
        try:
            return self._find_or_fetch(storage, shard)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise self._no_room(shard) from error
            raise PreflightError(
                f"the node's cache in {self.folder} cannot store {storage.uri(shard.path)}: {error}",
                next_step="repair the folder, or set PENSTOCK_CACHE_DIR to another one",
            ) from error

    def _find_or_fetch(self, storage: Storage, shard: ShardInfo) -> LocalShard:
        target = self.folder / shard.digest[:2] / f"{shard.digest}.arrow"
        held = _hold(target, shard)
        if held is not None:
            return held
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_suffix(".lock")):
            # Another process may have fetched it during the wait.
            return _hold(target, shard) or self._fetch(storage, shard, target)

    def _fetch(self, storage: Storage, shard: ShardInfo, target: Path) -> LocalShard:
        uri = storage.uri(shard.path)
        failure: PenstockError | None = None
        for _ in range(FETCH_TRIES):
            part, lock = self._reserve(shard)
            held = LocalShard(target, lock)
            try:
                storage.get_file(shard.path, part)
                count_fetched(shard.size_bytes)
                _check_size(part, shard, uri)
                if file_digest(part) != shard.digest:
                    raise ShardError(f"shard {uri} has another content than its manifest's digest {shard.digest}")
                with open(part, "rb") as handle:
                    os.fsync(handle.fileno())  # a power cut could leave a file of the right size that holds zeros
                # The lock stays with the renamed file, which therefore cannot be evicted before it is mapped.
                os.replace(part, target)
                remember_digests({str(target): shard.digest})
                return held
            except FileNotFoundError as error:
                raise _missing(shard, uri) from error
            except (ShardError, ServiceError) as error:
                failure = error
            finally:
                part.unlink(missing_ok=True)
        assert failure is not None
        if isinstance(failure, ShardError):
            # Without its record the next run makes the unit again. A reader may have no permission to write.
            with contextlib.suppress(PenstockError, OSError):
                storage.delete(unit_path(shard.unit, UNIT_RECORD))
        raise failure

    def _reserve(self, shard: ShardInfo) -> tuple[Path, IO[bytes]]:
        """Make room, and create a locked, empty file with the reserved size in its name."""
        with _lock(self.folder / "room.lock"):
            for left in self._parts.glob("*.part"):
                _evict(left)  # of killed processes; the others are locked
            used = self._used()
            if not self._fits(shard.size_bytes, used):
                used = self._evict_for(shard)
            self._parts.mkdir(exist_ok=True)
            part = self._parts / f"{shard.digest}.{shard.size_bytes}.{uuid.uuid4().hex[:8]}.part"
            lock = open(part, "wb")  # noqa: SIM115  (it outlives this function)
            fcntl.flock(lock, fcntl.LOCK_SH)
            self._record.write_text(str(used + shard.size_bytes))
            return part, lock

    def _fits(self, size: int, used: int) -> bool:
        return size <= min(self._budget_of(used) - used, shutil.disk_usage(self.folder).free - self._unwritten())

    def _evict_for(self, shard: ShardInfo) -> int:
        """Evict shards until this one fits. Returns the bytes that remain."""
        used, wanted = self._count(), shard.size_bytes
        for path in sorted(self.folder.glob("*/*.arrow"), key=lambda path: _stat(path.with_suffix(".lock"))[1]):
            if self._fits(wanted + self._budget_of(used) // _EVICTED_SHARE, used):
                break
            size, _ = _stat(path)
            used -= size if _evict(path) else 0
        if not self._fits(wanted, used):
            raise self._no_room(shard)
        return used

    def _used(self) -> int:
        """Return at least the bytes of shards in the folder and of running fetches, as recorded; count them if they are not."""
        with contextlib.suppress(OSError, ValueError):
            if self.folder in _counted:
                return int(self._record.read_text())
        _counted.add(self.folder)
        return self._count()

    def _count(self) -> int:
        # In this order: a file renamed between the two is counted twice rather than not at all.
        fetching = sum(map(_reserved, self._parts.glob("*.part")))
        return fetching + sum(_stat(path)[0] for path in self.folder.glob("*/*.arrow"))

    def _unwritten(self) -> int:
        """Return the bytes that are reserved and not written yet."""
        return sum(max(0, _reserved(part) - _stat(part)[0]) for part in self._parts.glob("*.part"))

    def _no_room(self, shard: ShardInfo) -> PreflightError:
        return PreflightError(
            f"{self.folder} has no room for a shard of {shard.size_bytes / 1e6:,.0f} MB: {self._used() / 1e6:,.0f} MB of the "
            f"{self.budget_bytes / 1e6:,.0f} MB it may take are being read, and "
            f"{shutil.disk_usage(self.folder).free / 1e6:,.0f} MB of its disk are free",
            next_step="raise PENSTOCK_CACHE_BYTES, set PENSTOCK_CACHE_DIR to a larger disk, or use shuffle.mode: windowed, "
            "which reads some shards at a time",
        )


def allow_open_files(shards: int) -> bool:
    """Raise this process's limit of open files for so many shards. Returns whether the hard limit allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = shards + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft == resource.RLIM_INFINITY or soft >= needed


def _hold(path: Path, shard: ShardInfo) -> LocalShard | None:
    """Lock the file for reading and set its time of use. Returns None if it is missing or has other bytes than the manifest.

    The time of use is that of the lock file: a new time of the shard itself would have it read and compared again.
    """
    try:
        lock = open(path, "rb")  # noqa: SIM115  (it outlives this function)
    except FileNotFoundError:
        return None
    fcntl.flock(lock, fcntl.LOCK_SH)
    own = os.fstat(lock.fileno())
    try:
        # Another process may have evicted it before the lock, and even fetched it again.
        is_current = os.stat(path).st_ino == own.st_ino
    except FileNotFoundError:
        is_current = False
    if not is_current or own.st_size != shard.size_bytes or content_digests([str(path)]) != [shard.digest]:
        lock.close()
        return None
    path.with_suffix(".lock").touch()
    return LocalShard(path, lock)


def _stat(path: Path) -> tuple[int, int]:
    """Return (bytes, time of the last use in ns); zeros for a file that another process renamed or deleted."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _evict(path: Path) -> bool:
    """Delete a file unless a process holds it. Returns whether it was deleted."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError), open(path, "rb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    return False


def _reserved(part: Path) -> int:
    return int(part.name.split(".")[1])


def _missing(shard: ShardInfo, name: str) -> ShardError:
    return ShardError(f"shard {name} is missing; its manifest lists {shard.rows} rows in it")


def _check_size(path: Path, shard: ShardInfo, name: str) -> None:
    size = path.stat().st_size
    if size != shard.size_bytes:
        raise ShardError(f"shard {name} has {size} bytes; its manifest lists {shard.size_bytes}")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between the processes of this node; it ends with the process."""
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
