"""Which temporary folders are a living process's own? What the others left behind, killed or ended, is removed.

An owner holds a lock on a file in its folder for as long as it lives, whatever kills it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import IO

__all__ = ["own_folder", "remove_unowned", "user_folder"]

_LOCK = ".owner.lock"


def user_folder() -> Path:
    """Return a temporary folder that only this user can write, shared by the user's processes."""
    base = Path(tempfile.gettempdir(), f"penstock-{os.getuid()}")
    base.mkdir(mode=0o700, exist_ok=True)
    status = os.lstat(base)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        return Path(tempfile.mkdtemp(prefix="penstock-"))  # another user made the folder: its content is not to be trusted
    return base


def own_folder(folder: Path, *, shared: bool = False) -> IO[bytes]:
    """Make the folder if need be, and own it until the file that is returned is closed, or this process ends.

    Args:
        shared: other processes may own it, too.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        with contextlib.suppress(FileNotFoundError):  # removed after it was made
            lock = open(folder / _LOCK, "wb")  # noqa: SIM115 - open is what it is returned for
            fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            if _is_of(lock, folder):
                return lock
            lock.close()


def remove_unowned(folders: Iterable[Path]) -> None:
    """Remove the folders whose owner has ended."""
    for folder in folders:
        with contextlib.suppress(OSError), open(folder / _LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_of(lock, folder):
                # Away first: an owner to be makes a new folder, and does not work in one of which a half is gone.
                away = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
                folder.rename(away)
                shutil.rmtree(away, ignore_errors=True)


def _is_of(lock: IO[bytes], folder: Path) -> bool:
    """Return whether the held lock is still the folder's: other processes may have removed and remade the folder."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / _LOCK))
    return False
