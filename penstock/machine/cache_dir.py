"""Where does a node keep what can be fetched or computed again?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from penstock.errors import SpecError
from penstock.temporary import user_folder

__all__ = ["cache_folder", "cache_root", "configured_budget", "configured_cache", "kept_free"]


def configured_cache() -> Path | None:
    """PENSTOCK_CACHE_DIR, absolute and with `~` replaced; None where it is not set."""
    configured = os.environ.get("PENSTOCK_CACHE_DIR")
    return Path(configured).expanduser().absolute() if configured else None


def cache_root() -> Path:
    """PENSTOCK_CACHE_DIR, or a folder in the home folder; of a user without one, as in some containers, a temporary folder."""
    if configured := configured_cache():
        return configured
    try:
        return Path.home() / ".cache" / "penstock"
    except RuntimeError:  # neither HOME nor an entry in passwd
        return user_folder() / "cache"


def cache_folder() -> Path:
    """The node's folder for shards that can be fetched again."""
    return configured_cache() or cache_root() / "shards"


def configured_budget() -> int | None:
    """PENSTOCK_CACHE_BYTES; None where it is not set. Raises SpecError if it is no size."""
    text = os.environ.get("PENSTOCK_CACHE_BYTES")
    if not text:
        return None
    try:
        return int(TypeAdapter(Annotated[ByteSize, Field(gt=0)]).validate_python(text))
    except ValidationError as error:
        raise SpecError(f"PENSTOCK_CACHE_BYTES={text!r} is no size", next_step="write it as 50000000000 or 50GB") from error


def kept_free(disk_bytes: int, free_bytes: int) -> int:
    """Bytes of a disk that stay free when PENSTOCK_CACHE_BYTES sets no budget.

    A tenth of it, or half of `free_bytes`, which counts what the cache holds, on a disk that is nearly so full already.
    """
    return min(disk_bytes // 10, free_bytes // 2)
