"""The framework `lightgbm`."""

from __future__ import annotations

from penstock.training.frameworks.boosted.framework import BoostedFramework
from penstock.training.frameworks.lightgbm.library import LIBRARY

__all__ = ["LIGHTGBM"]

LIGHTGBM = BoostedFramework(LIBRARY)
