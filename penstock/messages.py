"""How is a value written in a message?"""

from __future__ import annotations

__all__ = ["counted", "said_of", "shorten"]


def counted(count: int, one: str, many: str | None = None) -> str:
    """`1 file`, `1,200 files`: with `many` where it is more than an s, as in `file is` and `files are`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def shorten(value: object, limit: int = 60) -> str:
    """`value` as Python would write it, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def said_of(error: BaseException) -> str:
    """`KeyError: 'x'`; of an error without a text its kind alone."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
