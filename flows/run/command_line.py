"""Which command would a user type to go on?"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

__all__ = ["run_command"]


def run_command(file: Path | str, overrides: Sequence[str] = (), *options: str, verb: str = "run") -> str:
    """The `penstock` command, `run` or another verb, for the same pipeline, quoted so that it can be pasted into a shell."""
    return shlex.join(["penstock", verb, str(file), *(word for text in overrides for word in ("--set", text)), *options])
