"""Which names may `train.framework` take?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.plugins import Plugins

if TYPE_CHECKING:  # a pipeline file is read without loading torch
    from penstock.training.frameworks.framework import Framework

__all__ = ["FRAMEWORKS", "RECIPE_OPTIONAL"]

FRAMEWORKS: Plugins[Framework] = Plugins(
    "training framework",
    "penstock.frameworks",
    {
        "keras": "penstock.training.frameworks.keras.framework:KERAS",
        "lightning": "penstock.training.frameworks.lightning.framework:LIGHTNING",
        "ray_train": "penstock.training.frameworks.ray_train.framework:RAY_TRAIN",
        "torch": "penstock.training.frameworks.torch.framework:TORCH",
        "transformers": "penstock.training.frameworks.transformers.framework:TRANSFORMERS",
        "xgboost": "penstock.training.frameworks.xgboost.library:LIBRARY",
        "lightgbm": "penstock.training.frameworks.lightgbm.library:LIBRARY",
    },
    needs=("libraries", "loader", "model_files", "check", "train"),
)

RECIPE_OPTIONAL = frozenset({"xgboost", "lightgbm"})
"""Frameworks that train from `train.params` alone. Listed here, because a pipeline file is read without importing any."""
