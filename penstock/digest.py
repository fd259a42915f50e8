"""How does penstock name content? BLAKE3 over canonical bytes, in one place, so that every digest is made the same way.

Shards are hashed while they are prepared, on the same two cores: BLAKE3 does 4.5 GB/s of one core where blake2b does 0.8.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from blake3 import blake3

__all__ = ["DIGEST_BYTES", "arrays_digest", "bytes_digest", "canonical_json", "digest_of", "file_digest", "stream_digest"]

_READ_BYTES = 1 << 18
DIGEST_BYTES = 16
"""128 bits: collisions by accident are out of reach, and a name still fits on a line."""
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)  # `json.dumps` makes one a call


def canonical_json(value: Any) -> str:
    """Serialise JSON-able `value` so that equal values give equal text in every process."""
    return _CANONICAL.encode(value)


def digest_of(value: Any) -> str:
    """Digest a JSON-able value: 32 hex characters."""
    return bytes_digest(canonical_json(value).encode())


def bytes_digest(data: bytes | memoryview) -> str:
    """Digest bytes: 32 hex characters."""
    return blake3(data).hexdigest(DIGEST_BYTES)


def stream_digest(chunks: Iterable[bytes | memoryview]) -> str:
    """Digest the concatenation of `chunks`: 32 hex characters."""
    hasher = blake3()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest(DIGEST_BYTES)


def arrays_digest(arrays: Iterable[tuple[str, str, Sequence[int], bytes | memoryview]]) -> str:
    """Digest named arrays, given in the order of their names, each as (name, dtype, shape, content): 32 hex characters."""

    def canonical() -> Iterator[bytes | memoryview]:
        for name, dtype, shape, content in arrays:
            header = canonical_json([name, dtype, list(shape)]).encode()
            # The length in front keeps one array's bytes from being read as the next one's header.
            yield len(header).to_bytes(8, "little")
            yield header
            yield content

    return stream_digest(canonical())


def file_digest(file: str | Path | IO[bytes]) -> str:
    """Digest a file's content without holding it in memory."""
    if isinstance(file, (str, Path)):
        with open(file, "rb", buffering=0) as handle:
            return file_digest(handle)
    hasher, buffer = blake3(), memoryview(bytearray(_READ_BYTES))
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        hasher.update(buffer[:count])
    return hasher.hexdigest(DIGEST_BYTES)
