"""How is a value written in a message?"""

from __future__ import annotations

__all__ = ["shorten"]


def shorten(value: object, limit: int = 60) -> str:
    """`value` as Python would write it, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
