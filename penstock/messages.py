"""How is a value, a command, or several errors as one, written in a message?"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from penstock.errors import DataError, PenstockError, SpecError

__all__ = ["capped", "combine_errors", "counted", "describe_error", "did_you_mean", "in_yaml", "run_command", "shorten"]

_PLAIN_NAME = re.compile(r"[^\W\d][\w.\-]*( [\w.\-()]+)*")

_YAML_WORDS = {"true", "false", "null", "yes", "no", "on", "off"}


def capped(lines: list[str], limit: int = 20) -> list[str]:
    """Return the first `limit` lines, and a count of the rest."""
    return lines if len(lines) <= limit else [*lines[:limit], f"... and {len(lines) - limit} more"]


def counted(count: int, one: str, many: str | None = None) -> str:
    """Format `1 file` or `1,200 files`; `many` is the plural if it is more than an s, as in `file is` and `files are`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def in_yaml(name: str) -> str:
    """Return a name as a pipeline file has it, in quotes where YAML would read something else."""
    if _PLAIN_NAME.fullmatch(name) and name.lower() not in _YAML_WORDS:
        return name
    quoted = json.dumps(name, ensure_ascii=False)
    return "".join(sign if sign.isprintable() else f"\\U{ord(sign):08x}" for sign in quoted)


def shorten(value: object, limit: int = 60) -> str:
    """Format `value` as Python does, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def describe_error(error: BaseException) -> str:
    """Format as `KeyError: 'x'`, or the class alone if the error has no text."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def did_you_mean(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> str:
    """Suggest the closest known names, as `; did you mean 'a' or 'b'?`; empty where none is close. Case does not count."""
    by_lower = {each.lower(): each for each in sorted(known)}
    close = difflib.get_close_matches(name.lower(), by_lower, most, cutoff)
    return f"; did you mean {' or '.join(repr(by_lower[each]) for each in close)}?" if close else ""


def run_command(file: Path | str, overrides: Sequence[str] = (), *options: str, verb: str = "run") -> str:
    """Return the `penstock` command, `run` or another verb, for the same pipeline, quoted for a shell."""
    return shlex.join(["penstock", verb, str(file), *(word for text in overrides for word in ("--set", text)), *options])


def combine_errors(errors: Sequence[PenstockError], what: str) -> PenstockError:
    """Return several errors as one of their kind, or as a SpecError where kinds differ; a single one as it is.

    Args:
        errors: at least one. Of equal messages one counts.
        what: what they have in common, for the message.
    """
    parts = list({error.message: error for each in errors for error in each.parts or (each,)}.values())
    if len(parts) == 1:
        return parts[0]
    problems: list[str] = []
    for error in parts:
        if isinstance(error, SpecError) and error.problems:
            problems += error.problems  # each of them names its key
        else:
            problems.append(error.message + (f" ({'; '.join(error.problems)})" if error.problems else ""))
    steps = dict.fromkeys(step for error in parts if error.next_step for step in error.next_step.split("; "))
    kind = DataError if all(isinstance(error, DataError) for error in parts) else SpecError
    whole = kind(what, problems=problems, next_step="; ".join(steps))
    whole.parts = tuple(parts)
    return whole
