"""How is JSON-able data made fit for MLflow: flat, and within its limits on keys and values?"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.digest import bytes_digest

__all__ = ["fit_key", "fit_value", "flatten"]


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted path, text) for every leaf. Lists of scalars stay one value; empty containers yield nothing."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(inner, (Mapping, list, tuple)) for inner in value):
        for index, inner in enumerate(value):
            yield from flatten(inner, f"{prefix}.{index}")
    elif isinstance(value, str):
        yield prefix, value
    elif not isinstance(value, (list, tuple)) or value:
        yield prefix, json.dumps(value, ensure_ascii=False, default=str)


def fit_key(key: str, limit: int = 250) -> str:
    """Make `key` one MLflow accepts: its alphabet, at most `limit` characters; a shortened key ends in a digest."""
    clean = posixpath.normpath(re.sub(r"[^\w\-. :/]", "_", key).strip("/.") or "_")  # MLflow refuses `a//b` and `../a`
    return clean if len(clean) <= limit else f"{clean[: limit - 9]}-{bytes_digest(key.encode())[:8]}"


def fit_value(value: str, limit: int) -> str:
    """Shorten `value` to `limit` characters, ending in its length and digest, so that two long values still differ."""
    if len(value) <= limit:
        return value
    tail = f"... ({len(value)} characters, BLAKE3 {bytes_digest(value.encode())})"
    return value[: limit - len(tail)] + tail
