"""How is a source file opened, and what does it mean when a store refuses?

Reading goes through pyarrow's filesystems: its S3 client is 2 to 10 times as fast as s3fs on columnar files.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import posixpath
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs as arrow_fs

from penstock.errors import DataError, PenstockError, ServiceError
from penstock.storage import filesystem_of
from penstock.stores import DENIED, endpoint_of, is_local, is_s3, settings_of, store_problem

__all__ = [
    "COMPRESSED",
    "STORE_REQUESTS",
    "asking",
    "can_be_cut",
    "open_input",
    "open_span",
    "open_stream",
    "probe_endpoint",
    "read_blocks",
    "read_bytes",
    "read_characters",
    "read_problem",
]

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}

STORE_REQUESTS = 16
"""Files of a store that are asked for at the same time: most of the 20 ms that each takes is waiting."""

_PROBE_S = 2.0

_STREAM_BYTES = 1 << 20

_LINE_BYTES = 256 << 20
"""A longer line is refused: it is held whole, a few times while its row is made."""

_AWS_ENDPOINTS = {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"}

_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")


def open_input(uri: str) -> pa.NativeFile:
    """Open for random access."""
    fs, path = _arrow_filesystem(uri)
    return fs.open_input_file(path)


def open_stream(uri: str) -> pa.NativeFile:
    """Open for reading from start to end; `.gz`, `.bz2`, `.zst` and `.lz4` files are decompressed."""
    fs, path = _arrow_filesystem(uri)
    codec = COMPRESSED.get(_extension(uri))
    return fs.open_input_stream(path, compression=codec, buffer_size=_STREAM_BYTES)


class _Remote(io.RawIOBase):
    """A remote file; a read that fails raises an error that names the store, as in `asking`."""

    def __init__(self, fs: Any, path: str, uri: str) -> None:
        self._fs = fs  # that of an archive closes it with the last reference
        self._file, self._uri = fs.open(path, mode="rb"), uri

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def read(self, size: int = -1) -> bytes:
        with asking(self._uri):
            return bytes(self._file.read() if size < 0 else self._file.read(size))

    def close(self) -> None:
        self._file.close()
        super().close()


def open_span(uri: str, begin: int, end: int) -> pa.NativeFile:
    """Open the bytes from `begin` to `end` of a file that is not compressed, for reading from start to end."""
    return open_input(uri).get_stream(begin, end - begin)


def can_be_cut(uri: str) -> bool:
    """Whether reading may begin within the file: not where it is compressed."""
    return _extension(uri) not in COMPRESSED


def _extension(uri: str) -> str:
    """Return the extension of the file that is read: of `a.csv.gz` in the chain `zip://a.csv.gz::b.zip`."""
    first, _, rest = uri.lower().partition("::")
    return posixpath.splitext(first if "://" in first or not rest else rest)[1]


def open_head(uri: str, head_bytes: int) -> pa.NativeFile:
    """Open the lines that end within the first `head_bytes` of a file that is not compressed; nothing if none does."""
    with open_span(uri, 0, head_bytes) as stream:
        head = bytes(stream.read())
    return pa.BufferReader(head[: head.rfind(b"\n") + 1])


def read_bytes(uri: str) -> bytes:
    """Read the whole file, as it is stored."""
    if is_local(uri):
        with open(uri.removeprefix("file://"), "rb") as handle:
            return handle.read()
    with open_input(uri) as stream:
        return bytes(stream.read())


def read_blocks(uri: str, stream: pa.NativeFile, block_bytes: int, head: bytes = b"") -> Iterator[bytes]:
    """Yield blocks of at least `block_bytes` that end with a line; the last one may be smaller and end anywhere.

    Args:
        uri: of the file, for the error.
        head: what was read of the stream already.

    Raises:
        DataError: a line is of more than `_LINE_BYTES`.
    """
    parts: list[bytes] = []
    held = 0
    while block := head + stream.read(block_bytes):
        head = b""
        cut = block.rfind(b"\n") + 1
        if cut:
            yield b"".join([*parts, block[:cut]])
            parts, held = [], 0
        parts.append(block[cut:])
        held += len(block) - cut
        if held > _LINE_BYTES:
            raise DataError(
                f"{uri}: has a line of more than {_LINE_BYTES >> 20} MB, which is held whole",
                next_step="write a row a line, with line ends; a long text is read in parts with data.text: {rows: chunk}",
            )
    if rest := b"".join(parts):
        yield rest


def read_characters(stream: pa.NativeFile, block_bytes: int) -> Iterator[bytes]:
    """Yield blocks of about `block_bytes` of UTF-8 that end with a whole character; the last one may end anywhere."""
    rest = b""
    while block := stream.read(block_bytes):
        block = rest + block
        # Where the last character begins, which is four bytes at most.
        cut = next((at for at in range(len(block) - 1, max(0, len(block) - 5), -1) if block[at] & 0xC0 != 0x80), 0)
        block, rest = (block[:cut], block[cut:]) if cut else (block, b"")
        yield block
    if rest:
        yield rest


def _arrow_filesystem(uri: str) -> tuple[arrow_fs.FileSystem, str]:
    if is_local(uri):
        return arrow_fs.LocalFileSystem(), uri.removeprefix("file://")
    if is_s3(uri):
        path = uri.split("://", 1)[1]
        if "//" in path:
            raise DataError(
                f"{uri}: its key has a folder without a name, which this machine's S3 client cannot open",
                next_step="copy the object to a key without //, or name the others with a glob",
            )
        settings, endpoint = settings_of(uri), endpoint_of(uri)
        region = settings.region if settings is not None else None
        if region is None and endpoint is None:
            region = _region_of_bucket(path.split("/", 1)[0])
        region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if settings is None:
            credentials = tuple(os.environ.get(name) for name in _CREDENTIALS)
            return _s3_filesystem(endpoint, region, credentials), path
        if endpoint is None and _AWS_ENDPOINTS & os.environ.keys():
            endpoint = f"https://s3.{region or 'us-east-1'}.amazonaws.com"  # or the client would take theirs
        return _s3_filesystem(endpoint, region, settings.credentials() or (), settings.anonymous, named=True), path
    fs, path = filesystem_of(uri)
    return arrow_fs.PyFileSystem(_Handler(fs, uri)), path


class _Handler(arrow_fs.FSSpecHandler):  # type: ignore[misc]
    """As pyarrow's, except that the failure of a store is not taken for a damaged file."""

    def __init__(self, fs: Any, uri: str) -> None:
        super().__init__(fs)
        self._uri = uri

    def open_input_file(self, path: str) -> pa.NativeFile:
        with asking(self._uri):  # not also for whether there is a file: that takes any failure for a no
            return pa.PythonFile(_Remote(self.fs, path, self._uri), mode="r")

    open_input_stream = open_input_file


@contextlib.contextmanager
def asking(uri: str) -> Iterator[None]:
    """Around a call to a store's client: all but a missing file is a failure of the store.

    Raises:
        ServiceError: naming store, bucket and key.
    """
    try:
        yield
    except (FileNotFoundError, PenstockError):
        raise
    except Exception as error:  # every client has errors of its own, and few are OSErrors
        raise store_problem(uri, error) from error


@functools.lru_cache(maxsize=8)
def _s3_filesystem(
    endpoint: str | None, region: str | None, credentials: tuple[str | None, ...], anonymous: bool = False, named: bool = False
) -> arrow_fs.S3FileSystem:
    """Return one client for each set of settings, so that connections are reused.

    Args:
        credentials: those of the environment, which the client finds by itself, unless they are `named`.
    """
    options: dict[str, Any] = {"region": region} if region else {}
    if anonymous:
        options["anonymous"] = True
    elif named and credentials:
        options |= dict(zip(("access_key", "secret_key", "session_token"), credentials, strict=True))
    if endpoint:
        address = urlsplit(endpoint)
        options |= {"endpoint_override": address.netloc + address.path.rstrip("/"), "scheme": address.scheme}
        options.setdefault("region", "us-east-1")
    # The default of 3 attempts gives up within 1.5 s, less than a gateway takes to restart.
    retries = arrow_fs.AwsStandardS3RetryStrategy(max_attempts=10)
    return arrow_fs.S3FileSystem(retry_strategy=retries, connect_timeout=5, request_timeout=30, **options)


@functools.lru_cache(maxsize=64)
def _region_of_bucket(bucket: str) -> str | None:
    """Return the region of a bucket at Amazon, which its client does not find out; None without Amazon."""
    with contextlib.suppress(OSError):
        return str(arrow_fs.resolve_s3_region(bucket))
    return None


def probe_endpoint(uri: str) -> None:
    """Connect to a configured endpoint once, because S3 clients retry a dead one for 7 to 13 s before they report it.

    Raises:
        ServiceError: nothing listens there.
    """
    endpoint = endpoint_of(uri)
    address = urlsplit(endpoint) if endpoint else None
    if address is None or address.hostname is None:
        return
    if urllib.request.getproxies().get(address.scheme) and not urllib.request.proxy_bypass(address.hostname):
        return
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), timeout=_PROBE_S).close()
    except OSError as error:
        raise ServiceError(
            f"the S3 endpoint {endpoint} does not answer ({error}); {uri} cannot be read",
            next_step=f"start the store, or correct {'`stores`' if settings_of(uri) is not None else 'AWS_ENDPOINT_URL'}",
        ) from error


def read_problem(uri: str, error: Exception) -> DataError | ServiceError:
    """Turn what a reader raised into an error that names the file."""
    if isinstance(error, (DataError, ServiceError)):
        return error
    if isinstance(error, FileNotFoundError):
        return DataError(f"{uri}: gone since it was listed", next_step="run again; files must not change while they are read")
    text = " ".join(f"{error}".split())
    if not is_local(uri) and isinstance(error, OSError) and any(word in text for word in ("AWS", "curl", "HTTP", *DENIED)):
        return store_problem(uri, error)
    return DataError(
        f"{uri}: {text or type(error).__name__}",
        next_step="write or fetch the file again, see that it may be read, or move it out of the folder",
    )
