"""How is a value written in a message?"""

from __future__ import annotations

import json
import re

__all__ = ["counted", "in_yaml", "said_of", "shorten"]

_PLAIN_NAME = re.compile(r"[^\W\d][\w.\-]*( [\w.\-()]+)*")

_YAML_WORDS = {"true", "false", "null", "yes", "no", "on", "off"}


def counted(count: int, one: str, many: str | None = None) -> str:
    """`1 file`, `1,200 files`: with `many` where it is more than an s, as in `file is` and `files are`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def in_yaml(name: str) -> str:
    """A name as it stands in a pipeline file, in quotes where YAML would read something else."""
    if _PLAIN_NAME.fullmatch(name) and name.lower() not in _YAML_WORDS:
        return name
    quoted = json.dumps(name, ensure_ascii=False)
    return "".join(sign if sign.isprintable() else f"\\U{ord(sign):08x}" for sign in quoted)


def shorten(value: object, limit: int = 60) -> str:
    """`value` as Python would write it, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def said_of(error: BaseException) -> str:
    """`KeyError: 'x'`; of an error without a text its kind alone."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
