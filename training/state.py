"""How far is training?

The place in the data is three integers; the sample order is arithmetic on them, so there is nothing else to save for the feed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["TrainState"]


@dataclass(frozen=True)
class TrainState:
    """How far training is."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epoch the next batch belongs to, from 0."""
    position: int = 0
    """Rows of this epoch consumed by all ranks together."""

    def after_batch(self, position: int) -> TrainState:
        """The state once the global batch that ends at `position` is learned."""
        return replace(self, step=self.step + 1, position=position)

    def next_epoch(self) -> TrainState:
        """The state at the start of the following epoch."""
        return replace(self, epoch=self.epoch + 1, position=0)
