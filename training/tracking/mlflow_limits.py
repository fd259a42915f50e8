"""How are keys and values made fit for MLflow: within its alphabet and its limits?"""

from __future__ import annotations

import posixpath
import re

from penstock.digest import bytes_digest

__all__ = ["fit_key", "fit_value"]


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
