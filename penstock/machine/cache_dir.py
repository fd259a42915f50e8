"""Where does a node keep what can be fetched or computed again?"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder", "configured_cache"]


def configured_cache() -> Path | None:
    """PENSTOCK_CACHE_DIR, absolute and with `~` replaced; None where it is not set."""
    configured = os.environ.get("PENSTOCK_CACHE_DIR")
    return Path(configured).expanduser().absolute() if configured else None


def cache_folder() -> Path:
    """The node's folder for what can be fetched or computed again: PENSTOCK_CACHE_DIR, or one in the home folder."""
    return configured_cache() or Path.home() / ".cache" / "penstock" / "shards"
