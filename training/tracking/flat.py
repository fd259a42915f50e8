"""How does nested JSON-able data become named values?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["flatten"]


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted path, text) for every leaf. Lists of scalars stay one value; null and empty containers yield nothing."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(inner, (Mapping, list, tuple)) for inner in value):
        for index, inner in enumerate(value):
            yield from flatten(inner, f"{prefix}.{index}")
    elif isinstance(value, str):
        yield prefix, value
    elif value is not None and value != [] and value != ():
        yield prefix, json.dumps(value, ensure_ascii=False, default=str)
