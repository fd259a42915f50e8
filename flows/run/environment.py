"""Describe the environment of an attempt for the tracker: versions, platform, and the code's commit."""

from __future__ import annotations

import functools
import platform
import subprocess
from importlib.metadata import distributions
from pathlib import Path

__all__ = ["describe_environment", "git_commit"]


def git_commit(directory: Path) -> str | None:
    """Return the commit of `directory`, with `+changes` if tracked files differ; None outside a repository."""
    try:
        commit = _git(directory, "rev-parse", "HEAD")
        changed = _git(directory, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+changes" if changed else commit


@functools.cache
def describe_environment() -> str:
    """Describe Python, platform and the installed distributions, one `name==version` a line."""
    found = (distribution.metadata for distribution in distributions())
    lines = sorted({f"{metadata['Name']}=={metadata['Version']}" for metadata in found}, key=str.lower)
    return "\n".join([f"# Python {platform.python_version()} on {platform.platform()}", *lines]) + "\n"


def _git(directory: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(directory), *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
