"""Which metrics are better higher, and which lower?"""

from __future__ import annotations

from typing import Literal

__all__ = ["HIGHER_IS_BETTER", "LOWER_IS_BETTER", "mode_problem"]

LOWER_IS_BETTER = frozenset({"loss", "log_loss", "mae", "mse", "rmse", "calibration_error"})

HIGHER_IS_BETTER = frozenset(
    {"accuracy", "balanced_accuracy", "f1", "precision", "recall", "auroc", "average_precision", "mcc", "r2"}
)


def mode_problem(metric: str, mode: Literal["min", "max"]) -> str:
    """Explain why `mode` would keep the worst; empty if it does not, or if the metric is the user's own.

    Args:
        metric: as a validation names it: `val/accuracy`.
    """
    name = metric.rpartition("/")[2]
    if name in HIGHER_IS_BETTER and mode == "min":
        return f"{metric!r} is better the higher it is, and mode: min keeps the lowest; write mode: max"
    if name in LOWER_IS_BETTER and mode == "max":
        return f"{metric!r} is better the lower it is, and mode: max keeps the highest; write mode: min"
    return ""
