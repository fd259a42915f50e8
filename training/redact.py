"""How is JSON-able data made fit for a tracking server: without secrets, flat, and within its limits?"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.digest import bytes_digest

__all__ = ["fit_key", "fit_value", "flatten", "redact", "redact_text"]

HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(^|[._\-])(password|passwd|pwd|secret|secret_?key|secret_?access_?key|api_?key|access_?key(_?id)?|private_?key|credentials?"
    r"|auth_?string|((auth|access|api|session|bearer|refresh|secret|hf|github|aws_session)_)?token)$",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(?<=://)[^/\s@\"']+@")
_AWS_KEY_ID = re.compile(r"\b(AKIA|ASIA)[0-9A-Z]{16}\b")
_SIGNATURE = re.compile(r"(?i)\b(X-Amz-Signature|X-Amz-Credential|X-Amz-Security-Token|sig|signature|token)=[^&\s\"']+")


def redact_text(text: str) -> str:
    """Hide user info in URLs, AWS access key ids and signatures of presigned URLs."""
    text = _USERINFO.sub(f"{HIDDEN}@", text)
    text = _AWS_KEY_ID.sub(HIDDEN, text)
    return _SIGNATURE.sub(rf"\1={HIDDEN}", text)


def redact(value: Any, name: str = "") -> Any:
    """Hide secrets in JSON-able data: values under telling names (`api_key`), and those `redact_text` finds."""
    if isinstance(value, Mapping):
        return {key: redact(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(inner, name) for inner in value]
    if isinstance(value, str):
        return HIDDEN if value and _SECRET_NAME.search(name) else redact_text(value)
    return value


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
    tail = f"... ({len(value)} characters, blake2b {bytes_digest(value.encode())})"
    return value[: limit - len(tail)] + tail
