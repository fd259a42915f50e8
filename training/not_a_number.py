"""What does a training that has left the numbers tell its user?"""

from __future__ import annotations

from penstock.errors import TrainingError

__all__ = ["not_a_number"]


def not_a_number(what: str) -> TrainingError:
    """The error that ends training when `what` is not finite."""
    return TrainingError(
        f"{what}; nothing was saved after it",
        next_step="lower train.learning_rate or set train.clip_norm, look at the values of the features, and run again: it "
        "continues from the checkpoint before; train.on_nan: warn goes on regardless",
    )
