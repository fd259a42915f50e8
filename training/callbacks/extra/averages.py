"""Which weights are shown, when each step's are noisy? A moving average of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.errors import SpecError
from penstock.training.callbacks.callback import Training

__all__ = ["MovingAverage"]


class MovingAverage:
    """Keeps an exponential moving average of the weights; it is what is validated, saved as the model and registered.

    The trained weights are in the checkpoint, too: training continues from them.

    Args:
        decay: the average's share after each step; 0.999 remembers about the last 1,000 steps.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise SpecError(f"train.callbacks: ema got decay: {decay!r}; it lies between 0 and 1")
        self._decay = decay
        self._average: dict[str, Tensor] = {}
        """In float32 at least."""
        self._dtypes: dict[str, torch.dtype] = {}
        self._loaded: Mapping[str, Tensor] = {}

    def start(self, training: Training) -> None:
        """Begin with the weights as they are, or with the average that was saved."""
        state = training.model.state_dict()
        state = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.is_floating_point()}
        self._dtypes = {name: value.dtype for name, value in state.items()}
        for name, value in state.items():
            wide = torch.promote_types(value.dtype, torch.float32)
            self._average[name] = self._loaded.get(name, value).detach().to(value.device, wide, copy=True)

    def step(self, training: Training) -> None:
        """Move the average."""
        now = training.model.state_dict()
        with torch.no_grad():
            for name, average in self._average.items():
                average.lerp_(now[name].to(average.dtype), 1 - self._decay)

    def weights(self) -> dict[str, Tensor]:
        """The average, of all weights that are fractions, in their dtypes."""
        return {name: value.to(self._dtypes[name]) for name, value in self._average.items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Those that a checkpoint shows."""
        self._loaded = {**weights, **self._loaded}

    def state_dict(self) -> dict[str, Any]:
        """The averages of weights that have fewer bits than float32: one step would be lost in rounding."""
        return {name: value for name, value in self._average.items() if value.dtype != self._dtypes[name]}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from them; `load_weights` follows."""
        self._loaded = state
