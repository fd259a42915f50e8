"""Which names may `train.framework` take?"""

from __future__ import annotations

from penstock.plugins import Plugins
from penstock.training.frameworks.framework import Framework

__all__ = ["FRAMEWORKS"]

FRAMEWORKS: Plugins[Framework] = Plugins(
    "training framework",
    "penstock.frameworks",
    {"torch": "penstock.training.frameworks.torch.framework:TORCH"},
)
