"""Which names may `train.framework` take?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.plugins import Plugins

if TYPE_CHECKING:  # a pipeline file is read without loading torch
    from penstock.training.frameworks.framework import Framework

__all__ = ["FRAMEWORKS"]

FRAMEWORKS: Plugins[Framework] = Plugins(
    "training framework",
    "penstock.frameworks",
    {
        "ray_train": "penstock.training.frameworks.ray_train.framework:RAY_TRAIN",
        "torch": "penstock.training.frameworks.torch.framework:TORCH",
    },
    needs=("libraries", "loader", "model_files", "check", "try_batch", "train"),
)
