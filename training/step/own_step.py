"""How does a recipe with its own `training_step` learn on many ranks as on one?

The recipe calls backward and its optimizers. Before an optimizer's step, the gradients of its parameters become the mean over
the rows of all ranks: one sum in a fixed order, so that a resumed process gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import TrainingError
from penstock.training.ranks import Group
from penstock.training.recipe import Columns, Recipe

__all__ = ["OwnStep", "Several"]


class Several:
    """Named optimizers or schedules as one, in the order of their names. The recipe steps its optimizers itself.

    Args:
        parts: by name.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = dict(sorted(parts.items()))

    @property
    def kind(self) -> str:
        """Their classes: `critic: Adam, generator: SGD`."""
        return ", ".join(f"{name}: {type(part).__name__}" for name, part in self.parts.items())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All parameter groups, in the order of the optimizers."""
        return [group for part in self.parts.values() for group in part.param_groups]

    def step(self) -> None:
        """Step all schedules."""
        for part in self.parts.values():
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Collect the states by name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the state of each.

        Raises:
            ValueError: a state does not fit, or the names differ.
        """
        if saved.keys() != self.parts.keys():
            raise ValueError(f"the checkpoint has {sorted(saved)}, the recipe {sorted(self.parts)}")
        for name, part in self.parts.items():
            try:
                part.load_state_dict(saved[name])
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from error


class OwnStep:
    """One rank's side of such steps.

    Args:
        optimizer: one, or several by name, which the recipe gets as a dict.
        autocast: makes the context of the step.
        clip_norm: of each optimizer's gradients.
        on_gradients: called before each step of an optimizer, when its gradients are complete.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        optimizer: Optimizer | Several,
        group: Group,
        autocast: Callable[[], Any],
        clip_norm: float | None,
        on_gradients: Callable[[], None] = lambda: None,
    ) -> None:
        self._recipe, self._model, self._group = recipe, model, group
        self._autocast, self._clip_norm, self._on_gradients = autocast, clip_norm, on_gradients
        self._optimizers: Any = optimizer.parts if isinstance(optimizer, Several) else optimizer
        self._share = 1.0
        self.steps_missing = False
        """Whether a call of `training_step` has stepped no optimizer, as where gradients are added up over several."""
        self._stepped = False
        for each in self._optimizers.values() if isinstance(self._optimizers, dict) else [self._optimizers]:
            each.register_step_pre_hook(self._before_step)

    def __call__(self, batch: Columns, rows: int, global_rows: int) -> Tensor:
        """Learn one global batch. A collective; every rank's recipe steps its optimizers equally often.

        Returns:
            This rank's summand of the global mean of the loss that the recipe returned.
        """
        if rows == 0:
            raise TrainingError(
                f"a step has {global_rows} rows, none of them for this one of {self._group.world_size} workers, and "
                "training_step() needs one on each",
                next_step="set train.last_batch to drop or fill, or shuffle.lanes: 1",
            )
        self._share = rows / global_rows
        self._group.copy_first(list(self._model.buffers()))  # as DDP does: a forward pass may update or replace them
        self._stepped = False
        with self._autocast():
            loss = self._recipe.training_step(self._model, batch, self._optimizers)
        self.steps_missing |= not self._stepped
        return loss.detach().float() * self._share

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stepped = True
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._group.world_size > 1:
            if any(given is not None and given is not optimizer for given in (*args, *kwargs.values())):
                raise TrainingError(
                    f"{type(optimizer).__name__}.step() got a closure, which several workers cannot share",
                    next_step="call backward() before step(), or set train.workers to 1",
                )
            self._average(parameters)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self._clip_norm)
        self._on_gradients()

    def _average(self, parameters: list[Tensor]) -> None:
        own = [torch.zeros_like(p) if p.grad is None else p.grad * self._share for p in parameters]
        flat = [torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in own]
        reached = torch.tensor([float(p.grad is not None) for p in parameters], device=self._group.device)
        wide = [gradient.to(torch.promote_types(gradient.dtype, torch.float32)).reshape(-1) for gradient in flat]
        summed = torch.cat([*wide, reached])
        dist.all_reduce(summed)
        *means, reached = summed.split([*map(len, wide), len(parameters)])
        for parameter, gradient, part, mean, ranks in zip(parameters, own, flat, means, reached.tolist(), strict=True):
            part.copy_(mean.view_as(part))
            # A parameter that no rank reached keeps no gradient: no momentum, no weight decay.
            parameter.grad = gradient if ranks else None
