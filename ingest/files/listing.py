"""Which files does a pipeline read, and has one of them changed? Listing of a path, directory, glob or URL.

Clutter that other tools leave behind (`_SUCCESS`, `.crc`, hidden files, README, checksums) is never data. A directory gives the
files whose extension belongs to the format, and those without any; a glob or a single file gives what it names.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import posixpath
from pathlib import Path
from typing import Any

from fsspec.spec import AbstractFileSystem

from penstock.config import Section
from penstock.errors import DataError, Interrupted, PenstockError, ServiceError
from penstock.ingest.files.content_digests import DIGESTED_BYTES, content_digests
from penstock.ingest.files.opening import COMPRESSED, bucket_is_missing, probe_endpoint
from penstock.ingest.schema import SPLITS, Split
from penstock.ingest.spec import DataSpec, check_split_rules
from penstock.storage import filesystem_of
from penstock.stores import is_local, store_name, store_problem

__all__ = ["SourceFile", "capped", "extension_of", "fingerprints_in", "list_source"]


_MARKERS = (
    *("readme*", "license*", "licence*", "notice*", "changelog*", "sha*sums*", "md5sums*", "*.crc", "*.md5", "*.sha256"),
    *("thumbs.db", "desktop.ini", "*~", "*.tmp", "*.part", "*.swp"),
)


class SourceFile(Section):
    """One file of the source."""

    uri: str
    """Absolute path or URL, as a user may paste it."""
    name: str
    """Path relative to the location's root, with `/`."""
    location: Split
    """Which of `data.train`, `data.validation`, `data.test` the file was found under."""
    size_bytes: int
    fingerprint: str
    """Changes with the content: its digest, the etag on object stores, the modification time in ns where that is too much."""
    rows: int | None = None
    """None until the file was read."""


def list_source(data: DataSpec, base_dir: Path, extensions: tuple[str, ...]) -> list[SourceFile]:
    """List the files of every location, in the order train, validation, test, each by name. Local ones are read through once.

    Args:
        base_dir: where relative paths start.
        extensions: those of the format (penstock.ingest.formats.format), in lower case and with the dot.

    Raises:
        SpecError: the split rules contradict each other.
        DataError: a location is missing or holds no file of the format, or one file is in two locations.
        ServiceError: the store does not answer or refuses the credentials.
    """
    check_split_rules(data)
    files: list[SourceFile] = []
    for split in SPLITS:
        location = getattr(data, split)
        if isinstance(location, str):
            files += _list_location(data.format, extensions, split, base_dir, location)
    _refuse_shared_files(files)
    return files


def extension_of(name: str) -> str:
    """Lower-case extension with its dot, that of the content if the file is compressed (`a.csv.gz` gives `.csv`)."""
    stem, extension = posixpath.splitext(posixpath.basename(name).lower())
    return posixpath.splitext(stem)[1] if extension in COMPRESSED else extension


def capped(lines: list[str], limit: int = 20) -> list[str]:
    """The first `limit` lines, and a count of the rest."""
    return lines if len(lines) <= limit else [*lines[:limit], f"... and {len(lines) - limit} more"]


def _list_location(format: str, extensions: tuple[str, ...], split: Split, base_dir: Path, location: str) -> list[SourceFile]:
    uri = os.path.abspath(base_dir / os.path.expanduser(location)) if "://" not in location else location
    probe_endpoint(uri)
    try:
        fs, path = filesystem_of(uri)
        root, found = _find(fs, path)
        files = [
            SourceFile(
                uri=full if is_local(uri) else fs.unstrip_protocol(full),
                name=posixpath.relpath(full, root),
                location=split,
                size_bytes=int(info["size"] or 0),
                fingerprint=_fingerprint(full, info),
            )
            for full, info in found.items()
            if _is_wanted(posixpath.relpath(full, root), extensions, named=full == path, globbed=glob.has_magic(path))
        ]
    except Interrupted:
        raise
    except Exception as error:  # every store has errors of its own
        raise _listing_problem(split, uri, error) from error
    if not files:
        skipped = [f"skipped: {posixpath.relpath(full, root)}" for full in sorted(found)]
        raise DataError(
            f"data.{split}: no {format} file in {uri}, which takes {' '.join(extensions)}",
            problems=capped(skipped, 5),
            next_step=f"correct data.{split} or data.format; a glob such as {uri.rstrip('/')}/* takes files of any extension",
        )
    files.sort(key=lambda file: file.name)
    return _by_content(files) if is_local(uri) else files


def _by_content(files: list[SourceFile]) -> list[SourceFile]:
    """Local files with the digest of their content as fingerprint, unless they are too large to be read through for it."""
    if sum(file.size_bytes for file in files) > DIGESTED_BYTES:
        return files
    try:
        digests = content_digests([file.uri.removeprefix("file://") for file in files])
    except OSError:
        return files  # the reader names every file that it cannot open
    return [file.model_copy(update={"fingerprint": digest}) for file, digest in zip(files, digests, strict=True)]


def _find(fs: AbstractFileSystem, path: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """(root directory, files below it by path). Raises FileNotFoundError if nothing is there."""
    if glob.has_magic(path) and not fs.exists(path):
        root = _before_wildcard(path)
        found: dict[str, dict[str, Any]] = {}
        for full, info in fs.glob(path, detail=True).items():
            found |= {full: info} if info["type"] == "file" else fs.find(full, detail=True)
        if not found:
            raise FileNotFoundError(path)
    elif fs.isfile(path):
        root, found = posixpath.dirname(path), {path: fs.info(path)}
    else:
        root, found = path.rstrip("/"), fs.find(path, detail=True)
        if not found and not fs.exists(path):
            raise FileNotFoundError(path)
    # Object stores keep "folders" as empty objects whose key ends with a slash.
    return root, {full: info for full, info in found.items() if not full.endswith("/") and info["type"] == "file"}


def _before_wildcard(path: str) -> str:
    parts = path.split("/")
    return "/".join(parts[: next(index for index, part in enumerate(parts) if glob.has_magic(part))])


def _is_wanted(name: str, extensions: tuple[str, ...], *, named: bool, globbed: bool) -> bool:
    if named:
        return True
    # A leading underscore marks Spark's and Dask's own files (_SUCCESS, _metadata, _temporary): they hold no rows.
    if any(part.startswith((".", "_")) for part in name.split("/")):
        return False
    last = posixpath.basename(name).lower()
    if any(fnmatch.fnmatchcase(last, marker) for marker in _MARKERS):
        return False
    return globbed or extension_of(name) in ("", *extensions)


def _fingerprint(path: str, info: dict[str, Any]) -> str:
    if "ino" in info and "mtime" in info:
        return str(os.stat(path).st_mtime_ns)
    return fingerprints_in(info)[0]


def fingerprints_in(info: dict[str, Any]) -> list[str]:
    """What a store says of a file that changes with its content, the best first."""
    keys = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "updated", "mtime", "created")
    return [*(str(info[key]).strip('"') for key in keys if info.get(key)), f"size {info['size']}"]


def _refuse_shared_files(files: list[SourceFile]) -> None:
    seen: dict[str, SourceFile] = {}
    shared = []
    for file in files:
        first = seen.setdefault(file.uri, file)
        if first is not file:
            shared.append(f"{file.uri} is in data.{first.location} and in data.{file.location}")
    if shared:
        raise DataError(
            f"{len(shared)} source files are in two splits: the model would be judged on rows it has seen",
            problems=capped(shared),
            next_step="give each split a folder of its own, or a glob that leaves the others out",
        )


def _listing_problem(split: str, uri: str, error: Exception) -> PenstockError:
    where = f"data.{split}: {uri}"
    if isinstance(error, FileNotFoundError):
        if bucket_is_missing(uri):
            bucket = uri.split("://", 1)[1].split("/", 1)[0]
            return ServiceError(
                f"{where}: bucket {bucket!r} does not exist at {store_name(uri)}",
                next_step=f"correct the bucket in data.{split}, or AWS_ENDPOINT_URL if another store has it",
            )
        step = f"correct data.{split}; relative paths start at the pipeline file"
        return DataError(f"{where} matches no file", next_step=step)
    if is_local(uri):
        return DataError(f"{where} cannot be listed: {error}", next_step="check the path and its permissions")
    return store_problem(uri, error)
