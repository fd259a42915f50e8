"""Where does penstock's own code lie?"""

from __future__ import annotations

from pathlib import Path

import penstock

__all__ = ["IMPORT_ROOT", "PACKAGE_DIR"]

PACKAGE_DIR = Path(penstock.__file__).resolve().parent
"""The folder of the package `penstock`, which holds all others."""
IMPORT_ROOT = PACKAGE_DIR.parent
"""The folder that `penstock` is imported from: a checkout or site-packages."""
