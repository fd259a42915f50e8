"""Is a loss or a weight not a number?"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from penstock.errors import TrainingError

__all__ = ["IN_THE_MODEL", "check_weights", "not_a_number"]


IN_THE_MODEL = "where the model or train.params set it, or clip gradients there"
"""The place of the learning rate for frameworks that do not read `train.learning_rate`."""


def not_a_number(
    what: str, rate: str = "(train.learning_rate, or where the recipe's own optimizer() sets it) or set train.clip_norm"
) -> TrainingError:
    """Make the error that ends training; `what` is not finite. `rate` is the place of the learning rate."""
    return TrainingError(
        f"{what}; nothing was saved after it",
        next_step=f"lower the learning rate {rate}, check the values of the features, and run again: "
        "it continues from the checkpoint before, with the new rate",
    )


def check_weights(weights: Mapping[str, Tensor], step: int) -> None:
    """Raise that error if a weight after `step` steps is not a number."""
    numbers = {name: weight for name, weight in weights.items() if weight.is_floating_point()}
    # A sum finds one fastest; float8 has no sum. inf - inf is NaN, too, so suspects are checked again.
    total = sum(weight.sum().item() for weight in numbers.values() if weight.itemsize > 1)
    suspects = {name: weight for name, weight in numbers.items() if weight.itemsize == 1 or math.isnan(total)}
    bad = next((name for name, weight in suspects.items() if weight.isnan().any()), None)
    if bad is not None:
        raise not_a_number(f"the weight {bad} is not a number after step {step:,}")
