"""What does xgboost do for the pipeline? What all libraries of boosted trees do."""

from __future__ import annotations

from penstock.training.frameworks.boosted.framework import BoostedFramework
from penstock.training.frameworks.xgboost.library import LIBRARY

__all__ = ["XGBOOST"]

XGBOOST = BoostedFramework(LIBRARY)
