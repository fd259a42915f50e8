"""How do trees of lightgbm come back: from a checkpoint to be measured, from a registry to answer? Without Ray."""

from __future__ import annotations

from penstock.storage import Storage
from penstock.training.frameworks.boosted.model import BoostedModel, load_boosted
from penstock.training.frameworks.lightgbm.library import LIBRARY
from penstock.training.model import ModelSpec

__all__ = ["load"]


def load(spec: ModelSpec, files: Storage) -> BoostedModel:
    """The trees; `files` are a checkpoint's, or those of a registered model."""
    return load_boosted(LIBRARY, spec, files)
