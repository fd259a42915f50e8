"""Where does a node keep what can be fetched or computed again?"""

from __future__ import annotations

import os
from pathlib import Path

from penstock.temporary import user_folder

__all__ = ["cache_folder", "cache_root", "configured_cache"]


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
