"""What must not be seen in a log, an error or a record, and how is it hidden?"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["holds_secret", "redact", "redact_text"]

HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(^|[._\-])(password|passwd|pwd|secret|secret_?key|secret_?access_?key|api_?key|access_?key(_?id)?|private_?key"
    r"|credentials?|auth_?string|(auth|access|api|session|bearer|refresh|secret|hf|github)_token)$"
    # Not `pad_token`, `eos_token`: models have those.
    r"|(^|[.\-])token$",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(?<=://)[^/\s@\"']+@")
_PASSWORD = re.compile(r"://[^/\s@\"':]*:[^/\s@\"']+@")
_AWS_KEY_ID = re.compile(r"\b(AKIA|ASIA)[0-9A-Z]{16}\b")
_SIGNATURE = re.compile(r"(?i)\b(X-Amz-Signature|X-Amz-Credential|X-Amz-Security-Token|sig|signature|token)=[^&\s\"']+")
_ENVIRONMENT = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "PREFECT_API_KEY",
    "PREFECT_API_AUTH_STRING",
)
_TELLING = 8
"""Characters of a secret from the environment; a shorter one is found in harmless words."""


def holds_secret(name: str, value: str) -> bool:
    """Whether a setting looks like a secret: by its name or dotted path (`api_key`, `db.password`), or by its text."""
    if not value:
        return False
    text = _PASSWORD.search(value) or _AWS_KEY_ID.search(value) or _SIGNATURE.search(value)
    return bool(text or _SECRET_NAME.search(name))


def redact_text(text: str) -> str:
    """Hide user info in URLs, AWS access key ids, signatures of presigned URLs, and the secrets of this environment."""
    text = _USERINFO.sub(f"{HIDDEN}@", text)
    text = _AWS_KEY_ID.sub(HIDDEN, text)
    text = _SIGNATURE.sub(rf"\1={HIDDEN}", text)
    for name in _ENVIRONMENT:
        value = os.environ.get(name, "")
        if len(value) >= _TELLING:
            text = text.replace(value, HIDDEN)
    return text


def redact(value: Any, name: str = "") -> Any:
    """Hide secrets in JSON-able data: values under telling names (`api_key`), and those `redact_text` finds."""
    if isinstance(value, Mapping):
        return {key: redact(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(inner, name) for inner in value]
    if isinstance(value, str):
        return HIDDEN if value and _SECRET_NAME.search(name) else redact_text(value)
    return value
