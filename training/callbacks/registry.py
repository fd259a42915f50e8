"""Which callbacks can be asked for by name, and what is an entry of `train.callbacks` to a worker? Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.plugins import Plugins
from penstock.usercode.capture import UserCode

__all__ = ["CALLBACKS", "CallbackCode"]

_HERE = "penstock.training.callbacks"

CALLBACKS: Plugins[Any] = Plugins(
    "callback",
    "penstock.callbacks",
    {
        "early_stopping": f"{_HERE}.early_stopping:EarlyStopping",
        "ema": f"{_HERE}.averages:MovingAverage",
        "gradient_norms": f"{_HERE}.gradient_norms:GradientNorms",
        "json_lines": f"{_HERE}.files:JsonLines",
        "tensorboard": f"{_HERE}.files:TensorBoard",
    },
)


@dataclass(frozen=True)
class CallbackCode:
    """One entry of `train.callbacks`."""

    name: str
    """Of one of penstock's own or of a package's, or `file.py:Name`."""
    params: dict[str, Any]
    code: UserCode | None = None
    """Of `file.py:Name`."""
