"""Where does a node keep files that can be fetched or computed again?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from penstock.errors import SpecError
from penstock.temporary import user_folder

__all__ = ["cache_folder", "cache_root", "configured_budget", "configured_cache", "kept_free"]


def configured_cache() -> Path | None:
    """Return PENSTOCK_CACHE_DIR, absolute and with `~` replaced; None if it is not set."""
    configured = os.environ.get("PENSTOCK_CACHE_DIR")
    return Path(configured).expanduser().absolute() if configured else None


def cache_root() -> Path:
    """Return PENSTOCK_CACHE_DIR, else a folder in the home folder, else (in some containers) a temporary folder."""
    if configured := configured_cache():
        return configured
    try:
        return Path.home() / ".cache" / "penstock"
    except RuntimeError:  # neither HOME nor an entry in passwd
        return user_folder() / "cache"


def cache_folder() -> Path:
    """Return the node's folder for shards that can be fetched again."""
    return configured_cache() or cache_root() / "shards"


def configured_budget() -> int | None:
    """Return PENSTOCK_CACHE_BYTES; None if it is not set. Raises SpecError if it is not a size."""
    text = os.environ.get("PENSTOCK_CACHE_BYTES")
    if not text:
        return None
    try:
        return int(TypeAdapter(Annotated[ByteSize, Field(gt=0)]).validate_python(text))
    except ValidationError as error:
        raise SpecError(f"PENSTOCK_CACHE_BYTES={text!r} is not a size", next_step="write it as 50000000000 or 50GB") from error


def kept_free(disk_bytes: int, free_bytes: int) -> int:
    """Return the bytes of a disk that stay free when PENSTOCK_CACHE_BYTES sets no budget.

    A tenth of the disk, or on a fuller one half of `free_bytes`, in which the cache counts as free.
    """
    return min(disk_bytes // 10, free_bytes // 2)
