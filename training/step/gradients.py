"""How do the gradients of all ranks become one mean, with the same bits in a resumed process? By DDP.

DDP collects gradients in buckets and adds up each bucket over the ranks. Penstock changes three things:

- **Place of a gradient.** The sum over more than two ranks depends on a value's place in its bucket, and DDP rebuilds the
  buckets after its first backward: a resumed process, which starts with the first buckets, would differ in the last bit. So
  each process starts with a backward of zeros, in an order that does not depend on data.
- **Parameters that a backward does not reach.** The other ranks wait for their part of the sum, so zeros are sent. DDP's own
  way (`find_unused_parameters`) searches the graph in every step and adds a collective, which costs a small model a fifth of
  its speed. Here each rank's flags are the gradient of one more parameter in a bucket.
- **Parameters that no rank reached in a step** keep no gradient, so that weight decay and momentum leave them alone, as they do
  on a single rank.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import TrainingError
from penstock.training.recipe import Columns, Recipe

__all__ = ["Gradients", "MeanGradients"]


class _LossModule(nn.Module):
    """The recipe's loss as a module, so that DDP wraps the whole computation and a recipe sees its own model, not a wrapper."""

    def __init__(
        self, recipe: Recipe, model: nn.Module, callee: nn.Module, autocast: Any, reached: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.reached = reached
        self.model = model
        # In a tuple: a module set as an attribute would be registered and reduced twice.
        self._hidden = (recipe, callee, autocast)

    def forward(self, batch: Columns | None) -> Tensor:
        if batch is None:
            return torch.zeros((), device=next(self.model.parameters()).device)
        recipe, callee, autocast = self._hidden
        with autocast():
            return recipe.loss(callee, batch).float()


class Gradients:
    """Adds up the gradients of a step's parts, on one rank.

    Args:
        recipe: the user's.
        model: whose parameters get gradients.
        callee: the model, or its compiled form, which the recipe calls.
        autocast: makes the context of the forward pass.
        scaler: scales losses before their backward pass.
    """

    def __init__(
        self, recipe: Recipe, model: nn.Module, callee: nn.Module, autocast: Any, scaler: torch.amp.GradScaler
    ) -> None:
        self._scaler = scaler
        self._module: Any = _LossModule(recipe, model, callee, autocast)

    def add(self, part: Columns | None, weight: float, *, last: bool) -> Tensor:
        """Add the gradient of a part's mean loss times `weight`.

        Args:
            part: rows on the device; None for a rank without rows.
            weight: such that the sum over all parts and ranks, divided by the ranks, is the mean loss of the global batch.
            last: whether this part completes the step's gradients.

        Returns:
            The part's mean loss, a scalar on the device.
        """
        loss: Tensor = self._module(part)
        scaled = self._scaler.scale(loss * weight)  # also without rows: the scaler learns its device here
        if part is not None:
            scaled.backward()
        return loss.detach()


class MeanGradients(Gradients):
    """Averages them over the ranks with the last part of a step. Making it, and adding a last part, are collectives."""

    def __init__(
        self, recipe: Recipe, model: nn.Module, callee: nn.Module, autocast: Any, scaler: torch.amp.GradScaler
    ) -> None:
        super().__init__(recipe, model, callee, autocast, scaler)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
        first = self._trained[0]
        self._all = torch.ones(len(self._trained), dtype=first.dtype, device=first.device)
        # Its gradient holds a flag for each parameter: whether this rank reached it.
        self._reached = nn.Parameter(torch.zeros_like(self._all))
        self._module = DistributedDataParallel(_LossModule(recipe, model, callee, autocast, self._reached))
        self._settle()
        self._hooked: set[int] = set()
        for index, parameter in enumerate(self._trained):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._hooked.add(index))

    def _settle(self) -> None:
        """Let DDP choose its buckets by a backward of zeros, in an order that does not depend on data."""
        self._module(None)
        for parameter in [*reversed(self._trained), self._reached]:
            torch.autograd.backward([parameter], [torch.zeros_like(parameter)])
        self._module.zero_grad()  # the last backward has completed the sum

    def add(self, part: Columns | None, weight: float, *, last: bool) -> Tensor:
        """See `Gradients.add`; with the last part a collective."""
        self._hooked.clear()
        with nullcontext() if last else self._module.no_sync():
            loss = super().add(part, weight, last=last)
        if last:
            self._complete()
        return loss

    def _complete(self) -> None:
        """Send zeros for unreached parameters, and remove gradients that no rank has."""
        if thawed := [name for name, parameter in self._frozen.items() if parameter.requires_grad]:
            raise TrainingError(
                f"{thawed[0]} was frozen when training began and is not any more: several workers cannot add up its gradients",
                next_step="begin with a learning rate of 0 for it, in a group of its own, or thaw it in a train.start_from run",
            )
        late = [index for index in range(len(self._trained)) if index not in self._hooked]
        unused = [index for index in late if self._trained[index].grad is None]
        reached = self._all
        if unused:
            reached = reached.clone()
            reached[unused] = 0
        parameters = [self._trained[index] for index in late]
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]  # by the recipe, after it was built
        for parameter in frozen:
            parameter.requires_grad_(True)
        torch.autograd.backward([*parameters, self._reached], [*map(torch.zeros_like, parameters), reached])
        for parameter in frozen:
            parameter.requires_grad_(False)
        counted, self._reached.grad = self._reached.grad, None
        if unused and counted is not None:  # else no wait for the device
            for index, share in zip(unused, counted[unused].tolist(), strict=True):
                if share == 0:
                    self._trained[index].grad = None
