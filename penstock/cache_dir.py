"""Where does a node keep what can be fetched or computed again?"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["configured_cache"]


def configured_cache() -> Path | None:
    """PENSTOCK_CACHE_DIR, absolute and with `~` replaced; None where it is not set."""
    configured = os.environ.get("PENSTOCK_CACHE_DIR")
    return Path(configured).expanduser().absolute() if configured else None
