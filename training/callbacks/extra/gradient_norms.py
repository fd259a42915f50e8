"""How large are the gradients? Charted before each step, after clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.errors import SpecError
from penstock.training.callbacks.callback import Training
from penstock.training.own_values import record

__all__ = ["GradientNorms"]


class GradientNorms:
    """Charts `train/gradient_norm`, and with `modules` also `gradients/<module>` for each direct part of the model.

    Args:
        every: steps from one chart point to the next.
        modules: whether each part gets a chart.
    """

    def __init__(self, every: int = 1, modules: bool = False) -> None:
        if not isinstance(every, int) or every < 1:
            raise SpecError(f"train.callbacks: gradient_norms got every: {every!r}; it is a number of steps, 1 or more")
        self._every, self._modules = every, modules

    def gradients(self, training: Training) -> None:
        """Measure; what is on a GPU is not waited for."""
        if training.steps % self._every:
            return
        record("gradient_norm", _norm(list(training.model.parameters()), training.device))
        if self._modules:
            for name, module in training.model.named_children():
                record(f"gradients/{name}", _norm(list(module.parameters()), training.device))


def _norm(parameters: list[torch.nn.Parameter], device: torch.device) -> Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    found = [torch.linalg.vector_norm(g.coalesce().values() if g.is_sparse else g).float() for g in gradients]
    return torch.linalg.vector_norm(torch.stack(found)) if found else torch.zeros((), device=device)
