"""Where does penstock keep state, and how does a write become visible all at once?

One `Storage` is a root (a local directory or any fsspec URL) and paths below it. On a local disk a write is a temporary file,
fsync, rename; on an object store a put is atomic by itself. Callers write the manifest that makes other files count last.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import fsspec
from fsspec.asyn import sync
from fsspec.spec import AbstractFileSystem
from pydantic import BaseModel, ValidationError

from penstock.errors import PenstockError, PreflightError
from penstock.messages import did_you_mean
from penstock.stores import StoreSpec, is_local, is_s3, settings_of, store_problem

__all__ = ["NO_ROOM", "Storage", "existing_folder", "filesystem_of", "root_problem", "sync_directory", "url_problem"]

Record = TypeVar("Record", bound=BaseModel)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the OSError of a full disk."""


def filesystem_of(uri: str) -> tuple[AbstractFileSystem, str]:
    """Resolve `uri` to (fsspec filesystem, path inside it). Listings are never cached: another process may have written."""
    options: dict[str, Any] = {} if is_local(uri) else {"use_listings_cache": False}
    if is_s3(uri):
        options["skip_instance_cache"] = False
        if (settings := settings_of(uri)) is not None:
            options |= _s3fs_options(settings)
    fs, path = fsspec.core.url_to_fs(uri, **options)
    return fs, path


def existing_folder(path: Path) -> Path:
    """Return the path, or the closest parent that exists: on its disk the path would be made."""
    while not path.exists():
        path = path.parent
    return path


def _s3fs_options(settings: StoreSpec) -> dict[str, Any]:
    options: dict[str, Any] = {"anon": settings.anonymous, "endpoint_url": settings.endpoint}
    if settings.endpoint is None:
        options["config_kwargs"] = {"ignore_configured_endpoint_urls": True}
    if settings.region is not None:
        options["client_kwargs"] = {"region_name": settings.region}
    if (credentials := settings.credentials()) is not None:
        options |= dict(zip(("key", "secret", "token"), credentials, strict=True))
    return options


def url_problem(location: str) -> str | None:
    """Return why a location that names a store is not a URL of it: one slash, which makes it a path, or capitals."""
    scheme, colon, rest = location.partition(":")
    store = scheme.lower()
    if not colon or not rest.startswith("/") or store not in fsspec.available_protocols():
        return None
    if not rest.startswith("//"):
        return f"a URL has two slashes; did you mean {store}:/{'/' if store == 'file' else ''}{rest}?"
    return None if scheme == store else f"a store's name is in lower case; did you mean {store}:{rest}?"


def root_problem(root: str) -> str | None:
    """Return why nothing can be kept below `root`, a folder or a URL; judged by its text alone."""
    if "${" in root:
        return "environment variables are not put in; write it out, or let the shell do it: --set storage=..."
    if problem := url_problem(root):
        return problem
    scheme, _, rest = root.partition(":")
    if "://" not in root or scheme == "file":
        return None
    if scheme not in fsspec.available_protocols():
        return f"there is no store {scheme!r}{did_you_mean(scheme, fsspec.available_protocols(), cutoff=0.5)}"
    return None if rest.strip("/") else f"it names no bucket; write {scheme}://bucket/prefix"


_RECORDS = (".json", ".jsonl", ".txt")
"""Ends of the names of single small files."""


class Storage:
    """Files below one root URI. Picklable: it holds the URI only, and opens its filesystem on first use in each process.

    All paths are relative, with `/`. Paths that do not exist raise FileNotFoundError. A remote store that does not answer or
    refuses raises ServiceError naming endpoint, bucket and key; a local disk raises its own OSError.
    """

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root.removeprefix("file://")) if is_local(root) else root.rstrip("/")
        self._fs: AbstractFileSystem | None = None
        self._base = ""

    def __reduce__(self) -> tuple[object, ...]:
        return Storage, (self.root,)

    def __repr__(self) -> str:
        return f"Storage({self.root!r})"

    @property
    def is_local(self) -> bool:
        """Return whether the files lie on this machine's own disks (or a mount that looks like them)."""
        return is_local(self.root)

    def refuse_file(self, called: str = "storage") -> None:
        """Raise PreflightError where the root of a local storage, or what it would lie in, is a file."""
        if not self.is_local:
            return
        found = existing_folder(Path(self.root))
        if not found.is_dir():
            raise PreflightError(
                f"{called} {self.root}: {found} is a file, and a {called} is a folder, or a URL such as s3://bucket/prefix",
                next_step=f"name a folder as `{called}`, or move the file away, and run the same command again",
            )

    def uri(self, path: str = "") -> str:
        """Return the absolute URI of `path`."""
        return f"{self.root}/{path}" if path else self.root

    def child(self, path: str) -> Storage:
        """Return the storage rooted at `path` below this one. Raises ValueError for a path that leaves it."""
        _check_inside(path)
        child = Storage(self.uri(path))
        if self._fs is not None:
            child._fs, child._base = self._locate(path)
        return child

    def _locate(self, path: str) -> tuple[AbstractFileSystem, str]:
        _check_inside(path)
        if self._fs is None:
            self._fs, self._base = filesystem_of(self.root)
        return self._fs, f"{self._base.rstrip('/')}/{path}" if path else self._base

    @contextlib.contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        """Give a remote store's errors one face: its clients raise a dozen of their own, and few are OSErrors.

        A full disk of this machine, where a file is fetched to, is not an error of the store.
        """
        try:
            yield
        except (FileNotFoundError, PenstockError):
            raise
        except Exception as error:  # every store's library has classes of its own
            if self.is_local or isinstance(error, ValueError) or getattr(error, "errno", None) in NO_ROOM:
                raise
            raise store_problem(self.uri(path), error) from error

    def exists(self, path: str) -> bool:
        """Tell whether a file or a non-empty folder is at `path`."""
        with self._translated(path):
            fs, full = self._locate(path)
            return bool(fs.exists(full))

    def size(self, path: str) -> int:
        """Return the file's size in bytes."""
        with self._translated(path):
            fs, full = self._locate(path)
            return int(fs.info(full)["size"])

    def read_bytes(self, path: str, *, in_one: bool = False) -> bytes:
        """Read the whole file; of a store `in_one` request without asking for the size first, as records are."""
        if self.is_local:
            return self.local_path(path).read_bytes()
        with self._translated(path):
            fs, full = self._locate(path)
            # Of a record, s3fs need not ask for the size first: it is read as one part.
            one_part = {"max_concurrency": 1} if is_s3(self.root) and (in_one or path.endswith(_RECORDS)) else {}
            return bytes(fs.cat_file(full, **one_part))

    @contextlib.contextmanager
    def open(self, path: str, size_bytes: int | None = None) -> Iterator[IO[bytes]]:
        """Open a binary stream for the block, in which nothing but reading should fail; of up to 32 MB, in one request."""
        if not self.is_local and size_bytes is not None and size_bytes <= 32 << 20:
            yield io.BytesIO(self.read_bytes(path, in_one=True))
            return
        with self._translated(path):
            fs, full = self._locate(path)
            with fs.open(full, "rb") as stream:
                yield stream

    def read_json(self, path: str) -> Any:
        """Parse the file as JSON. Raises ValueError on text that is not JSON."""
        return json.loads(self.read_bytes(path))

    def read_record(self, path: str, kind: type[Record]) -> Record | None:
        """Read a JSON file as a `kind`; None if there is no file, or none that is of that kind."""
        try:
            return kind.model_validate_json(self.read_bytes(path))
        except (FileNotFoundError, ValidationError):
            return None

    def write_bytes(self, path: str, data: bytes) -> None:
        """Replace `path` with `data`; a reader sees the old file or the new one, never a part."""
        if not self.is_local:
            with self._translated(path):
                fs, full = self._locate(path)
                fs.pipe_file(full, data)
            return
        target = self.local_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _beside(target) as temporary:
            _write_durably(temporary, data)
            os.replace(temporary, target)
        sync_directory(target.parent)

    def write_json(self, path: str, value: Mapping[str, Any] | list[Any]) -> None:
        """Replace `path` with JSON of `value`, in one line, which json writes in C."""
        self.write_bytes(path, json.dumps(value, sort_keys=True, ensure_ascii=False).encode())

    def put_file(self, local: str | Path, path: str) -> None:
        """Move or upload a finished local file to `path`, visible all at once. The local file may be gone afterwards.

        One that was made at its place already is made durable there.
        """
        if not self.is_local:
            with self._translated(path):
                fs, full = self._locate(path)
                fs.put_file(str(local), full)
            return
        target = self.local_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(local, "rb") as handle:
            with contextlib.suppress(OSError):  # safetensors makes files that others of the group cannot read
                os.fchmod(handle.fileno(), target.parent.stat().st_mode & 0o666)
            os.fsync(handle.fileno())
        if target != Path(local):
            _move(Path(local), target)
        sync_directory(target.parent)

    def get_file(self, path: str, local: str | Path) -> None:
        """Download (or copy) `path` to a local file."""
        with self._translated(path):
            fs, full = self._locate(path)
            fs.get_file(full, str(local))

    def create_exclusive(self, path: str, data: bytes) -> bool:
        """Create `path` only if nothing is there; False if another process was first.

        Local: a hard link of a finished file, which is atomic. Object stores: a conditional put; stores that do not know the
        condition, or let several racers win, are caught by listing before and reading back (see penstock/lease.py).
        """
        if self.is_local:
            target = self.local_path(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            with _beside(target) as temporary:
                _write_durably(temporary, data)
                try:
                    os.link(temporary, target)
                except FileExistsError:
                    return False
            return True
        with self._translated(path):
            fs, full = self._locate(path)
            try:
                fs.pipe_file(full, data, mode="create")
            except OSError as error:
                if fs.exists(full):
                    return False
                raise store_problem(self.uri(path), error) from error  # a bucket that is missing, too
        return True

    def list(self, path: str = "") -> list[str]:
        """List the names (not paths) of files and folders in `path`, without hidden ones. Empty if absent."""
        try:
            entries = [str(info["name"]).rstrip("/") for info in self._entries(path)]
        except FileNotFoundError:
            return []
        own = self._locate(path)[1].rstrip("/")
        names = {entry.rsplit("/", 1)[-1] for entry in entries if entry != own}
        return sorted(name for name in names if name and not name.startswith("."))

    def sizes(self, path: str = "") -> dict[str, int]:
        """Return the bytes of the files directly in `path`, by name. Empty if absent."""
        try:
            if self.is_local:
                with os.scandir(self.local_path(path)) as entries:
                    return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
            found = self._entries(path)
        except FileNotFoundError:
            return {}
        return {info["name"].rsplit("/", 1)[-1]: int(info["size"] or 0) for info in found if info["type"] == "file"}

    def tree(self, path: str = "") -> dict[str, int]:
        """Return the bytes of all files below `path`, hidden ones too, by path from the storage's root. Empty if absent."""
        if self.is_local:
            root, found = self.local_path(), {}
            for folder, _, names in os.walk(root / path):
                for name in names:
                    file = Path(folder, name)
                    with contextlib.suppress(FileNotFoundError):  # a temporary name of another process
                        found[file.relative_to(root).as_posix()] = file.lstat().st_size
            return found
        try:
            return self._sizes_of(self._entries(path, deep=True))
        except FileNotFoundError:
            return {}

    def small_tree(self, path: str, most: int = 500) -> dict[str, int] | None:
        """Do as `tree` in one request; None if there are `most` files or more, or the store has no such request."""
        found = self._entries(path, deep=True, most=most) if is_s3(self.root) else []
        return self._sizes_of(found) if 0 < len(found) < most else None

    def _sizes_of(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        base = f"{self._base.strip('/')}/"
        files = (info for info in entries if not info["name"].endswith("/"))  # without markers of folders
        return {str(info["name"]).strip("/").removeprefix(base): int(info["size"] or 0) for info in files}

    def _entries(self, path: str, *, deep: bool = False, most: int | None = None) -> Sequence[dict[str, Any]]:
        """Return what fsspec knows of a folder's entries, or with `deep` of all files below it."""
        with self._translated(path):
            fs, full = self._locate(path)
            if is_s3(self.root):  # s3fs' `ls` and `find` ask once or twice more where a folder is empty
                return sync(fs.loop, fs._lsdir, full, delimiter="" if deep else "/", max_items=most)  # type: ignore[no-any-return]
            return [*fs.find(full, detail=True).values()] if deep else fs.ls(full, detail=True)

    def delete(self, path: str) -> None:
        """Remove a file or a folder with all below it; nothing happens if it is not there.

        On a store, a path that ends in .json, .jsonl or .txt is taken for a file: a folder of such a name stays.
        """
        with contextlib.suppress(FileNotFoundError), self._translated(path):
            if not self.is_local:
                fs, full = self._locate(path)
                if path.endswith(_RECORDS):
                    fs.rm_file(full)  # one request; a folder is listed first
                else:
                    fs.rm(full, recursive=True)
            elif (target := self.local_path(path)).is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink()

    def delete_files(self, paths: Sequence[str]) -> None:
        """Remove files that are there; a store that can does it in one request."""
        with self._translated(paths[0]):
            self._locate("")[0].rm([self._locate(path)[1] for path in paths])

    def local_path(self, path: str = "") -> Path:
        """Return the path on disk. Raises ValueError for a remote root."""
        if not self.is_local:
            raise ValueError(f"{self.root} is not a local directory")
        _check_inside(path)
        return Path(self.root, path)


def _check_inside(path: str) -> None:
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"path {path!r} leaves the storage root")


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Yield a name for a file that gets the target's name once it is whole; it is removed after every failure."""
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
    except OSError as error:
        if error.errno in NO_ROOM or not error.filename:  # a copy names its source
            error.filename = str(target)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _write_durably(file: Path, data: bytes) -> None:
    with open(file, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def _move(finished: Path, target: Path) -> None:
    """Rename a durable file, or copy it where it lies on another disk; seen at `target` all at once either way."""
    if finished.stat().st_dev == target.parent.stat().st_dev:
        os.replace(finished, target)
        return
    with _beside(target) as temporary:
        shutil.copy(finished, temporary)
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, target)


def sync_directory(directory: Path) -> None:
    """Make a rename itself durable: without it a power cut may forget the new name."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
