"""Which callbacks have names?"""

from __future__ import annotations

from typing import Any

from penstock.plugins import Plugins

__all__ = ["CALLBACKS"]

_HERE = "penstock.training.callbacks"

CALLBACKS: Plugins[Any] = Plugins(
    "callback",
    "penstock.callbacks",
    {"early_stopping": f"{_HERE}.early_stopping:EarlyStopping", "ema": f"{_HERE}.extra.averages:MovingAverage"},
)
