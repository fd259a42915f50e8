"""How is one optimizer step computed, the same on one rank or many, and which state is saved?

The global batch is cut into one part per rank. Parts may differ by a row or be empty, so each rank's mean loss is weighted by
`rows * world_size / global_rows`: after DDP has averaged over the ranks, the gradient is that of the mean over the global
batch.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ResumeError, TrainingError
from penstock.ingest.feed.lists import batch_rows_of
from penstock.training.callbacks.callback import Callbacks
from penstock.training.checkpoint.packed import after_copy, copied, pack
from penstock.training.checkpoint.state_files import loadable, saved_extra, tensors_of, with_extra
from penstock.training.own_values import logged_rows
from penstock.training.ranks import Group
from penstock.training.recipe import Columns, Recipe
from penstock.training.spec import TrainSpec
from penstock.training.state import TrainState
from penstock.training.step.gradients import Gradients, MeanGradients
from penstock.training.step.hyperparameters import changed_hyperparameters, hyperparameters_of
from penstock.training.step.own_step import OwnStep, Several
from penstock.training.step.unsaved import changed_parts, parts_of, unsaved_state

__all__ = ["Learner"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Learner:
    """Model, optimizer, scheduler and gradient scaler of one rank.

    Args:
        model: the result of `build_model`.
        spec: precision, accumulation, clipping, learning rate.
        group: the ranks that train together.
        packed: columns of lists that batches hold packed.
        callbacks: called before each step; saved with the optimizer; may replace the saved weights.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        spec: TrainSpec,
        group: Group,
        packed: Collection[str] = (),
        callbacks: Callbacks | None = None,
    ) -> None:
        self._spec = spec
        self.callbacks = callbacks or Callbacks()
        self._packed = packed
        self._recipe = recipe
        self._group = group
        self.model = model.to(group.device)
        if group.world_size > 1:
            _refuse_sparse(model)
        # dynamic=False: one kernel per shape, so that a resumed process has the same kernels as one after a short batch.
        self.callee: nn.Module = torch.compile(self.model, dynamic=False) if spec.compile else self.model  # type: ignore[assignment]
        made = recipe.optimizer(self.model, spec.learning_rate)
        self.made_optimizer = made
        """The result of the recipe's `optimizer`."""
        self.optimizer: Any = Several(made) if isinstance(made, dict) else made
        schedule = recipe.scheduler(made)
        self.scheduler: Any = Several(schedule) if isinstance(schedule, dict) else schedule
        # Refuse, before the first step, what could be saved and not loaded.
        saved_extra(model.state_dict())
        loadable(self.optimizer.state_dict(), "optimizer", packs=True)
        if self.scheduler is not None:
            loadable(self.scheduler.state_dict(), "scheduler", packs=True)
        self.hyperparameters = hyperparameters_of(self.optimizer, self.scheduler, recipe.scheduler_every)
        """As set by the recipe, before the first step."""
        self._parts, self._groups = parts_of(model), len(self.optimizer.param_groups)
        self._modes = [module for module in model.modules() if _is_kept_frozen(module)]
        self.scaler = torch.amp.GradScaler(group.device.type, enabled=spec.precision == "fp16")
        self._learns: OwnStep | Gradients
        if recipe.has("training_step"):
            seen = partial(self.callbacks.call, "gradients")
            self._learns = OwnStep(recipe, self.model, self.optimizer, group, self.autocast, spec.clip_norm, seen)
        else:
            kind = MeanGradients if group.world_size > 1 else Gradients
            self._learns = kind(recipe, self.model, self.callee, self.autocast, self.scaler)

    def check_callbacks(self) -> None:
        """Refuse started callbacks whose state could be saved but not loaded."""
        if self.callbacks:
            loadable(self.callbacks.state_dict(), "callbacks", packs=True)

    def autocast(self) -> Any:
        """Return the context of the forward pass."""
        enabled = self._spec.precision != "fp32"
        return torch.autocast(self._group.device.type, dtype=_DTYPES[self._spec.precision]) if enabled else nullcontext()

    @property
    def learning_rate(self) -> float:
        """That of the first parameter group; NaN without one."""
        return float(self.optimizer.param_groups[0].get("lr", math.nan))

    def step(self, batch: Columns, rows: int, global_rows: int) -> Tensor:
        """Learn one global batch. A collective.

        Args:
            batch: this rank's rows, on its device.
            rows: of this rank; may be 0.
            global_rows: of all ranks.

        Returns:
            This rank's summand of the global mean loss, a scalar on the device.

        Raises:
            TrainingError: the user's code fails.
        """
        with self._recipe.reraise_as_user_error("a step of training"):
            return self._step(batch, rows, global_rows)

    def train_mode(self) -> None:
        """Set train mode, except for parts that `build_model` has frozen and put into eval mode."""
        self.model.train()
        for module in self._modes:
            module.eval()

    def _step(self, batch: Columns, rows: int, global_rows: int) -> Tensor:
        self.train_mode()
        if isinstance(self._learns, OwnStep):
            logged_rows(rows)
            total = self._learns(batch, rows, global_rows)
            self._end_step()
            return total
        parts = _micro_batches(batch, rows, self._spec.accumulate, self._packed)
        total = torch.zeros((), device=self._group.device)
        for index, (part, part_rows) in enumerate(parts):
            logged_rows(part_rows)
            weight = part_rows * self._group.world_size / global_rows
            loss = self._learns.add(part, weight, last=index == len(parts) - 1)
            total += loss * (part_rows / global_rows)
        if self._spec.clip_norm is not None or self.callbacks:
            self.scaler.unscale_(self.optimizer)
        if self._spec.clip_norm is not None:
            owned = {id(each) for group in self.optimizer.param_groups for each in group["params"]}
            nn.utils.clip_grad_norm_([each for each in self.model.parameters() if id(each) in owned], self._spec.clip_norm)
        logged_rows(1)
        self.callbacks.call("gradients")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)  # parameters that the optimizer does not have would add theirs up
        self._end_step()
        return total

    def _end_step(self) -> None:
        logged_rows(1)
        if self.scheduler is not None and self._recipe.scheduler_every == "step":
            self.scheduler.step()

    def end_epoch(self) -> None:
        """Step a scheduler that counts epochs."""
        if self.scheduler is not None and self._recipe.scheduler_every == "epoch":
            with self._recipe.reraise_as_user_error("a step of the scheduler"):
                self.scheduler.step()

    def sync_buffers(self) -> None:
        """Copy rank 0's buffers (batch norm's running statistics), which are saved, to every rank. A collective."""
        self._group.copy_first(list(self.model.buffers()))

    def copy_weights(self) -> Callable[[], dict[str, Tensor]]:
        """Start to copy the weights to the CPU; later steps do not change the copy.

        Returns:
            A function that waits for the copy and returns it. Any thread may call it.
        """
        self._refuse_new_state()
        state_dict = self.model.state_dict()
        shown = {**tensors_of(state_dict), **saved_extra(state_dict), **self.callbacks.weights()}
        weights = {name: copied(value) for name, value in shown.items()}
        return after_copy(weights, self._group.device)

    def unsaved_state(self) -> dict[str, object]:
        """Return state of the user's code that no checkpoint holds."""
        parts = self.optimizer.parts if isinstance(self.optimizer, Several) else {"optimizer": self.optimizer}
        found = unsaved_state(self.model, {"recipe": self._recipe.user, **parts, **self.callbacks.without_state})
        added_up = isinstance(self._learns, OwnStep) and self._learns.steps_missing
        return {**found, "a sum of gradients over several steps": added_up}

    def _refuse_new_state(self) -> None:
        changed, groups = changed_parts(self._parts, parts_of(self.model)), len(self.optimizer.param_groups)
        if groups != self._groups:
            changed.append(f"{groups} parameter groups instead of {self._groups}")
        if changed:
            raise TrainingError(
                f"training has changed what the model or optimizer consists of: {', '.join(changed)}; a checkpoint of it could "
                "not be loaded into what the recipe builds",
                next_step="make all of it in build_model() and optimizer()",
            )

    def copy_training(self) -> Callable[[], dict[str, Any]]:
        """Start to copy all other saved state, packed; see `copy_weights`."""
        weights = self.model.state_dict()
        training = {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "scaler": self.scaler.state_dict(),
        }
        if self.callbacks:
            training["callbacks"] = self.callbacks.state_dict()
            training["trained"] = {name: weights[name] for name in self.callbacks.weights()}
        return after_copy(pack(training), self._group.device)

    def restore(
        self,
        weights: Mapping[str, Tensor],
        training: Mapping[str, Any],
        reached: TrainState,
        made_with: Mapping[str, str],
        *,
        same_settings: bool = True,
    ) -> list[str]:
        """Load copied weights and the unpacked rest, before the first step.

        Changed hyperparameters count from now on; a changed schedule continues at the step that training has reached.

        Args:
            reached: the state of training at the checkpoint.
            made_with: the hyperparameters of the checkpoint.
            same_settings: nothing has changed, so that an end which a callback asked for is kept.

        Returns:
            The names of the changed hyperparameters.

        Raises:
            ResumeError: the checkpoint is from another model or optimizer, or a changed schedule does not reach its step.
        """
        changed = changed_hyperparameters(made_with, self.hyperparameters)
        scheduled = "scheduler" if self.scheduler is None else "lr|momentum|betas|scheduler"
        replayed = re.search(scheduled, " ".join(changed)) is not None
        if replayed:
            self._replay_schedule(reached)
        try:
            groups = self.optimizer.param_groups
            new = [{name: value for name, value in group.items() if replayed or name in changed} for group in groups]
            self.model.load_state_dict(with_extra({**weights, **training.get("trained", {})}, self.model.state_dict()))
            self.optimizer.load_state_dict(training["optimizer"])
            parts = self.optimizer.parts if isinstance(self.optimizer, Several) else {"": self.optimizer}
            for name, part in parts.items():
                _keep_form(part, training["optimizer"][name] if name else training["optimizer"])
            if self.scheduler is not None and not replayed:
                self.scheduler.load_state_dict(training["scheduler"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise _does_not_fit(reached, error) from error
        for group, options in zip(self.optimizer.param_groups, new, strict=True):
            group.update(options)
        if "callbacks" in training:
            self.callbacks.load_state_dict(training["callbacks"], weights, same=same_settings)
        if training["scaler"]:
            self.scaler.load_state_dict(training["scaler"])
        return changed

    def _replay_schedule(self, reached: TrainState) -> None:
        if self.scheduler is None:
            return
        try:
            with warnings.catch_warnings(action="ignore"):  # torch warns that no optimizer's step came before
                for _ in range(reached.step if self._recipe.scheduler_every == "step" else reached.epoch):
                    self.scheduler.step()
        except Exception as error:  # the user's code, such as a table of rates that is too short
            raise _does_not_fit(reached, error) from error


def _does_not_fit(reached: TrainState, error: Exception) -> ResumeError:
    return ResumeError(
        f"the checkpoint of step {reached.step:,} does not fit the recipe's model, optimizer or schedule: {error}",
        next_step="undo the change of the recipe, or start over with `penstock run FILE --fresh`",
    )


def _keep_form(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Undo torch's cast of optimizer state to the weights' dtype: float32 averages of bfloat16 weights would lose bits."""
    for index, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
        if index in saved["state"]:
            optimizer.state[parameter] = _formed(optimizer.state[parameter], saved["state"][index], parameter)


def _formed(loaded: Any, saved: Any, parameter: Tensor) -> Any:
    """Return saved state on its device; of a parameter's shape with its strides, which a fused step takes for granted."""
    if isinstance(saved, dict):
        return {key: _formed(loaded[key], value, parameter) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_formed(*pair, parameter) for pair in zip(loaded, saved, strict=True))
    if isinstance(saved, Tensor) and loaded.dtype != saved.dtype:
        loaded = saved.to(loaded.device)
    alike = type(saved) is Tensor and saved.layout is torch.strided and saved.shape == parameter.shape
    return torch.empty_like(parameter, dtype=loaded.dtype, device=loaded.device).copy_(loaded) if alike else loaded


def _micro_batches(batch: Columns, rows: int, count: int, packed: Collection[str] = ()) -> list[tuple[Columns | None, int]]:
    """Cut a rank's rows into at most `count` contiguous parts; the number of parts may differ between ranks."""
    if rows == 0:
        return [(None, 0)]
    count = min(count, rows)
    edges = [index * rows // count for index in range(count + 1)]
    if count == 1:
        return [(batch, rows)]
    return [(batch_rows_of(batch, a, b, packed), b - a) for a, b in itertools.pairwise(edges)]


def _is_kept_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return not module.training and bool(parameters) and not any(each.requires_grad for each in parameters)


def _refuse_sparse(model: nn.Module) -> None:
    """Refuse sparse gradients on several ranks: Gloo's sum of them corrupts memory (torch 2.13), and NCCL has none."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise TrainingError(
                f"{type(module).__name__} {name!r} has sparse=True, whose gradients several workers cannot add up",
                next_step="take sparse=True from it, or set train.workers to 1",
            )
