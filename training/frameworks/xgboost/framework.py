"""The framework `xgboost`."""

from __future__ import annotations

from penstock.training.frameworks.boosted.framework import BoostedFramework
from penstock.training.frameworks.xgboost.library import LIBRARY

__all__ = ["XGBOOST"]

XGBOOST = BoostedFramework(LIBRARY)
