"""Which files are at a path, below a folder, or match a glob? Links are followed on a local disk, also those to folders.

Hugging Face's hub, DVC, git-annex and Bazel lay out folders of nothing but links.
"""

from __future__ import annotations

import glob
import os
import posixpath
import stat
from collections.abc import Iterator
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

__all__ = ["find_files"]


def find_files(fs: AbstractFileSystem, path: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return (root directory, path -> facts about each file below it). Raises FileNotFoundError if nothing is there.

    A link to nothing is listed, with `leads_nowhere`: it may be clutter.

    Raises:
        OSError: a folder could not be listed.
    """
    if _walks(fs):
        fs = _Whole(fs)
    if glob.has_magic(path) and not fs.exists(path):
        root = _before_wildcard(path)
        found: dict[str, dict[str, Any]] = {}
        for full, info in fs.glob(path, detail=True).items():
            found |= {full: info} if info["type"] == "file" else _below(fs, full, root)
        if not found:
            raise FileNotFoundError(path)
    elif fs.isfile(path) and not _is_folder_mark(fs, path):
        root, found = posixpath.dirname(path), {path: fs.info(path)}
    else:
        root = path.rstrip("/")
        found = _below(fs, root or "/", root)
        if not found and not fs.exists(path):
            raise FileNotFoundError(path)
    # Object stores keep "folders" as empty objects, whose key ends with a slash, or is that of the files below without it.
    folders = {posixpath.dirname(full) for full in found}
    marks = {full for full in folders & found.keys() if not found[full]["size"]}
    for full in [f for f, info in found.items() if f.endswith("/") or info["type"] != "file" or f in marks]:
        del found[full]  # in place: there may be millions of others
    return root, found


def _is_folder_mark(fs: AbstractFileSystem, path: str) -> bool:
    """Whether an object is empty, and others lie below its key."""
    return not isinstance(fs, LocalFileSystem) and not fs.info(path)["size"] and bool({*fs.find(path)} - {path})


def _walks(fs: AbstractFileSystem) -> bool:
    """Whether it lists folder by folder, as fsspec does for those that have no better way."""
    if isinstance(fs, LocalFileSystem):
        return False
    if isinstance(fs, AsyncFileSystem):
        return type(fs)._find is AsyncFileSystem._find and type(fs)._glob is AsyncFileSystem._glob
    return type(fs).find is AbstractFileSystem.find and type(fs).glob is AbstractFileSystem.glob


class _Whole(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system whose `find` and `glob` leave out no folder that cannot be listed, as fsspec's walk does without a word."""

    cachable = False

    def __init__(self, fs: AbstractFileSystem) -> None:
        super().__init__()
        self._fs = fs
        self._strip_protocol = fs._strip_protocol
        self.ls, self.info, self.isfile, self.isdir, self.exists = fs.ls, fs.info, fs.isfile, fs.isdir, fs.exists

    def walk(self, path: str, maxdepth: int | None = None, **options: Any) -> Iterator[Any]:
        """As fsspec's, which comes back here for each folder below."""
        return super().walk(path, maxdepth, **{**options, "on_error": _unless_gone})  # type: ignore[no-any-return]


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # between the listing of the folder above and here
        raise error


def _before_wildcard(path: str) -> str:
    parts = path.split("/")
    return "/".join(parts[: next(index for index, part in enumerate(parts) if glob.has_magic(part))])


def _below(fs: AbstractFileSystem, path: str, root: str) -> dict[str, dict[str, Any]]:
    """Return the files below a folder, or the one file that a link names."""
    if not isinstance(fs, LocalFileSystem):
        return fs.find(path, detail=True)  # type: ignore[no-any-return]
    if not os.path.isdir(path):
        return {path: _info(path)} if os.path.lexists(path) else {}
    above, parent = set(), path
    while parent.startswith(root) and len(parent) > len(root):
        parent = posixpath.dirname(parent)
        above.add(os.path.realpath(parent))
    return {full: _info(full) for full in _walk(path, frozenset(above))}


def _walk(folder: str, above: frozenset[str]) -> Iterator[str]:
    """Yield all paths but folders; `above` are the real paths of the folders around it, which a link may lead back to."""
    real = os.path.realpath(folder)
    if real in above:
        return
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir():
                yield from _walk(entry.path, above | {real})
            else:
                yield entry.path


def _info(path: str) -> dict[str, Any]:
    """List by one call of the system, where fsspec's own makes several."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        if not os.path.islink(path):
            return {"type": "gone"}  # between the listing and here, as temporary files do
        return {"type": "file", "size": 0, "leads_nowhere": os.readlink(path)}
    kind = "file" if stat.S_ISREG(found.st_mode) else "other"
    return {"type": kind, "size": found.st_size, "stat": found}
