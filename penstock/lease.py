"""Who may work on a run now? One owner at a time, and a dead owner's place can be taken.

A lease is a row of numbered files, `<path>/<generation>.json`. The process that creates the next number owns it: creation is
exclusive on a local disk and conditional on an object store. The owner rewrites its file every few seconds (the heartbeat); a
higher number, or another owner's name in its own file, shows it that it counts as dead. Some object stores let two
racers create one object, so a new owner reads its file back after a pause.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.config import Section
from penstock.errors import LeaseHeldError, ServiceError
from penstock.machine.process import ProcessIdentity
from penstock.storage import Storage

__all__ = ["LeaseHolder", "current_holder", "delete_left", "hold_lease", "last_heartbeat", "refuse_if_held", "wait_until_free"]

HEARTBEAT_S = 5.0
"""Seconds between heartbeats."""
EXPIRES_S = 45.0
"""A holder on another machine that has been silent so long may be dead: nine missed heartbeats survive a slow store. Clocks
differ, so it is watched for another `WATCH_S`."""
WATCH_S = 15.0
"""How long a holder that seems silent is watched for a heartbeat before its place is taken, by this machine's clock alone."""
CLOCKS_DIFFER_S = 86_400.0
"""A holder that has been silent for longer is not watched where nobody wants its place."""
BRIEFLY_S = 0.1
"""Pause between two looks at a holder that is waited for."""
SILENCE_S = 2.0
"""A wait that is longer is reported."""
OLD_GENERATIONS = 32
"""Files before the last generation that are deleted together: on a store that is one request in so many runs."""
_HELD_HERE: set[str] = set()
"""Owners of this process's leases: one of its own that could not be released, because the store was away, is free."""
_LEFT: dict[str, LeaseHolder] = {}
"""Lease -> the dead holder with which this process deleted it."""
SETTLE_S = 0.5
"""Pause before an object store is read back after a conditional put."""


class LeaseHolder(Section):
    """The owner of a lease."""

    owner: str
    process: ProcessIdentity
    heartbeat: float
    """Seconds since the epoch."""
    released: bool = False
    brief: bool = False
    """Held for moments: the next process waits."""

    def __str__(self) -> str:
        return f"{self.process} (last heartbeat {max(0.0, time.time() - self.heartbeat):.0f} s ago)"


def current_holder(storage: Storage, path: str, *, watch: bool = False) -> LeaseHolder | None:
    """Return the living holder of the lease, or None if it is free.

    Args:
        watch: look for `WATCH_S` whether a holder on another machine, silent by this machine's clock, lives by its own.
    """
    generation = _last_generation(storage, path)
    holder = _read(storage, path, generation) if generation else None
    if holder is None or _holds(holder):
        return holder
    near = abs(time.time() - holder.heartbeat) < CLOCKS_DIFFER_S
    return holder if watch and near and _heartbeat_changes(storage, path, generation, holder) else None


def delete_left(storage: Storage, folder: str) -> list[str]:
    """Delete the leases below a folder that were released, or whose holder died on this machine; return the names of the rest.

    A lease that cannot be deleted is among them, and stays for the next call.
    """
    leases: dict[str, list[int]] = {}
    for file in storage.tree(folder):
        name, _, generation = file.removeprefix(f"{folder}/").partition("/")
        if generation.endswith(".json"):
            leases.setdefault(name, []).append(int(generation.removesuffix(".json")))
    left = []
    for name, generations in sorted(leases.items()):
        path = f"{folder}/{name}"
        holder = _read(storage, path, max(generations))
        if holder is not None and (holder.released or holder.process.is_alive is False):
            _LEFT[path] = holder
            with contextlib.suppress(OSError, ServiceError):
                for file in [path] if storage.is_local else [_file(path, generation) for generation in sorted(generations)]:
                    storage.delete(file)
                continue
        left.append(name)
    return left


def last_heartbeat(storage: Storage, path: str, process: ProcessIdentity) -> float | None:
    """Return when a process last renewed its lease, in seconds since the epoch; None if that is not known."""
    holders = (_LEFT.get(path), *(_read(storage, path, each) for each in _generations(storage, path)))
    return max((each.heartbeat for each in holders if each is not None and each.process == process), default=None)


def refuse_if_held(storage: Storage, path: str) -> None:
    """Raise LeaseHeldError if another process holds the lease, and not for moments only."""
    holder = current_holder(storage, path)
    if holder is not None and not holder.brief:
        raise _refusal(storage, path, holder)


def wait_until_free(storage: Storage, path: str, on_wait: Callable[[LeaseHolder], None]) -> None:
    """Return once no living process holds the lease. `on_wait` is called once if that takes longer than two seconds."""
    warn_at: float | None = time.monotonic() + SILENCE_S
    while (holder := current_holder(storage, path, watch=True)) is not None:
        if warn_at is not None and time.monotonic() > warn_at:
            on_wait(holder)
            warn_at = None
        time.sleep(BRIEFLY_S)


@contextmanager
def hold_lease(
    storage: Storage,
    path: str,
    on_lost: Callable[[LeaseHeldError], None] = lambda _error: None,
    *,
    brief: bool = False,
    nested: bool = False,
    unused: bool = False,
    on_wait: Callable[[LeaseHolder], None] = lambda _holder: None,
) -> Iterator[LeaseHolder]:
    """Own the lease at `path` for the duration of the block; a holder that is `brief` is waited for.

    Args:
        on_lost: see below.
        brief: held for moments, so that others wait.
        nested: each process takes it while it holds another lease, so that its numbers may begin again: a store keeps no file.
        unused: under that other lease, `delete_left` has left nothing of it, so that it is listed only if creating it fails.
        on_wait: called once with the holder if it is waited for longer than two seconds.

    `on_lost` is called from the heartbeat thread when another process has the lease: this process was silent for longer than
    `EXPIRES_S` and `WATCH_S`, or the store let two racers create one object. The caller must stop writing, and raise what it
    is given.

    Raises:
        LeaseHeldError: a living process holds it.
    """
    generation, holder = _acquire(storage, path, brief, unused, on_wait)
    stop = threading.Event()
    thread = threading.Thread(
        target=_beat, args=(storage, path, generation, holder, stop, on_lost), name="penstock-lease", daemon=True
    )
    thread.start()
    try:
        yield holder
    finally:
        stop.set()
        _HELD_HERE.discard(holder.owner)
        thread.join(timeout=HEARTBEAT_S)
        # A failure here, as of a full disk, must not hide the block's own error; a dead holder is replaced anyway.
        with contextlib.suppress(OSError, ServiceError):
            own = _read(storage, path, generation)
            if own is not None and own.owner == holder.owner:  # in a generation that another has followed it counts for nothing
                released = holder.model_copy(update={"released": True})
                if thread.is_alive():  # a heartbeat that hangs in the store may land later, over this file, not over the next
                    storage.create_exclusive(_file(path, generation + 1), released.model_dump_json().encode())
                elif nested and generation == 1 and not storage.is_local:
                    storage.delete(_file(path, generation))
                else:
                    _write(storage, path, generation, released)


def _acquire(
    storage: Storage, path: str, brief: bool, unused: bool, on_wait: Callable[[LeaseHolder], None]
) -> tuple[int, LeaseHolder]:
    warn_at: float | None = time.monotonic() + SILENCE_S
    while True:
        generations = [] if unused else _generations(storage, path)
        unused, last = False, max(generations, default=0)
        held = _read(storage, path, last) if last else None
        if held is not None and (_holds(held) or _heartbeat_changes(storage, path, last, held)):
            if not held.brief:
                raise _refusal(storage, path, held)
            if warn_at is not None and time.monotonic() > warn_at:
                on_wait(held)
                warn_at = None
            time.sleep(BRIEFLY_S)
            continue
        holder = LeaseHolder(owner=uuid.uuid4().hex, process=ProcessIdentity.current(), heartbeat=time.time(), brief=brief)
        _HELD_HERE.add(holder.owner)  # before it can be read
        with contextlib.ExitStack() as not_held:
            # Also where it was made and the answer lost: this process must not be in its own way.
            not_held.callback(_HELD_HERE.discard, holder.owner)
            if not _create(storage, path, last + 1, holder):
                continue
            old = [_file(path, each) for each in generations if each < last]
            with contextlib.suppress(OSError, ServiceError):  # they take room and do no harm
                if len(old) >= OLD_GENERATIONS:
                    storage.delete_files(old)
            not_held.pop_all()
        return last + 1, holder


def _create(storage: Storage, path: str, generation: int, holder: LeaseHolder) -> bool:
    """Create a generation; return whether this process alone has made it."""
    if not storage.create_exclusive(_file(path, generation), holder.model_dump_json().encode()):
        return False
    if storage.is_local:
        return True
    time.sleep(SETTLE_S)
    written = _read(storage, path, generation)
    return written is not None and written.owner == holder.owner


def _refusal(storage: Storage, path: str, holder: LeaseHolder) -> LeaseHeldError:
    pid, host = holder.process.pid, holder.process.host
    stop, free = f"it (kill {pid} on {host})", "a dead holder is replaced by itself"
    if holder.process.is_alive is None:
        free = f"the place of a dead holder is free {EXPIRES_S + WATCH_S:.0f} s after its last heartbeat"
        if host == socket.gethostname():  # the pid is one of another container, perhaps an ended one of the same name
            stop = "its container"
    return LeaseHeldError(
        f"{storage.uri(path)} is held by {holder}: one process at a time may work on a run",
        next_step=f"wait for it, or stop {stop}; {free}",
    )


def _beat(
    storage: Storage,
    path: str,
    generation: int,
    holder: LeaseHolder,
    stop: threading.Event,
    on_lost: Callable[[LeaseHeldError], None],
) -> None:
    while not stop.wait(HEARTBEAT_S):
        try:
            last = _last_generation(storage, path)
            newest = _read(storage, path, max(last, generation))
            if last > generation or (newest is not None and newest.owner != holder.owner):
                error = LeaseHeldError(
                    f"{storage.uri(path)} was taken over by {newest or 'another process'}: this process had been silent for so "
                    "long that it counted as dead; it ends and writes nothing more",
                    next_step="leave the run to that process, or run the same command once it has ended: it continues",
                )
                return on_lost(error)
            _write(storage, path, generation, holder.model_copy(update={"heartbeat": time.time()}))
        except Exception:
            # Every store has errors of its own, and one that is away for a moment does not stop the run: EXPIRES_S leaves
            # room for nine beats.
            continue


def _holds(holder: LeaseHolder) -> bool:
    if holder.released or (holder.process == ProcessIdentity.current() and holder.owner not in _HELD_HERE):
        return False
    alive = holder.process.is_alive
    # A heartbeat of the future is of another clock, and proves as little as an old one.
    return abs(time.time() - holder.heartbeat) < EXPIRES_S if alive is None else alive


def _heartbeat_changes(storage: Storage, path: str, generation: int, holder: LeaseHolder) -> bool:
    """Watch a silent holder on another machine; return whether it renews its record (its clock may be skewed)."""
    if holder.released or holder.process.is_alive is not None:
        return False
    deadline = time.monotonic() + WATCH_S
    while time.monotonic() < deadline:
        time.sleep(min(HEARTBEAT_S / 2, WATCH_S))
        seen = _read(storage, path, generation)
        if seen is not None and seen != holder:
            return not seen.released
    return False


def _file(path: str, generation: int) -> str:
    return f"{path}/{generation:08d}.json"


def _generations(storage: Storage, path: str) -> list[int]:
    return [int(name.removesuffix(".json")) for name in storage.list(path) if name.endswith(".json")]


def _last_generation(storage: Storage, path: str) -> int:
    return max(_generations(storage, path), default=0)


def _read(storage: Storage, path: str, generation: int) -> LeaseHolder | None:
    return storage.read_record(_file(path, generation), LeaseHolder)


def _write(storage: Storage, path: str, generation: int, holder: LeaseHolder) -> None:
    storage.write_bytes(_file(path, generation), holder.model_dump_json().encode())
