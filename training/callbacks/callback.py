"""What may a callback do, and when is it called?

A callback is a plain class; there is no base class to import. Its constructor takes the options beside its name in
`train.callbacks`. Each method is optional, and is called on every rank unless noted:

    class Callback:
        def start(self, training)                   # before the first step of a worker group, also after a restart
        def gradients(self, training)               # before each step of an optimizer, with the gradients of all ranks' rows
        def step(self, training)                    # after each step
        def epoch(self, training)                   # after the last step of an epoch, before its validation
        def validation(self, training, metrics)     # after a validation: {"val/loss": ...}
        def checkpoint(self, training)              # when a checkpoint of this step begins to be written
        def logged(self, training, step, values)    # rank 0: numbers that go to the charts
        def failure(self, training, error)          # an exception ends training on this rank
        def end(self, training)                     # training is finished
        def state_dict(self) / load_state_dict(self, state)     # rank 0's is kept in each checkpoint, and given to all ranks
        def weights(self) / load_weights(self, weights)         # weights to validate, save and register instead of the trained

`training.stop(reason)` ends training after the step in hand: it is validated, saved and finished. One rank may ask alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import SpecError, TrainingError
from penstock.storage import Storage
from penstock.training.callbacks.registry import CALLBACKS
from penstock.training.job import CallbackCode
from penstock.training.ranks import Group
from penstock.training.recipe import Recipe
from penstock.training.rng import keeping_rng
from penstock.training.state import TrainState

__all__ = ["HOOKS", "Callbacks", "Training", "load_callbacks"]

HOOKS = ("start", "gradients", "step", "epoch", "validation", "checkpoint", "logged", "failure", "end")


@dataclass
class Training:
    """What a callback sees of the training."""

    model: nn.Module
    """As `build_model` returned it."""
    optimizer: Any
    """As the recipe's `optimizer` returned it."""
    rank: int
    world_size: int
    device: torch.device
    validates: bool
    """Whether there is a validation split."""
    storage: Storage
    """The run's."""
    steps: int = 0
    """Optimizer steps done."""
    epochs: int = 0
    """Epochs done."""
    stop_reason: str | None = None

    def stop(self, reason: str) -> None:
        """End training after the step in hand, as finished."""
        self.stop_reason = self.stop_reason or reason

    @property
    def folder(self) -> Path:
        """A folder of the run for files. Raises TrainingError if the run's storage is not a folder."""
        if not self.storage.is_local:
            raise TrainingError(
                f"{self.storage.uri('')} is not a folder that a callback can write to",
                next_step="give the callback a folder of its own: {folder: PATH}",
            )
        folder = self.storage.local_path("callbacks")
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class Callbacks:
    """All callbacks of one rank.

    Args:
        named: callbacks by what `train.callbacks` calls them, in its order.
    """

    def __init__(self, named: Sequence[tuple[str, Any]] = ()) -> None:
        self._named = [(f"{index}: {name}", name, each) for index, (name, each) in enumerate(named)]
        self._training: Training | None = None
        self.ended: str | None = None
        """Why training has ended before the spec's end; a checkpoint keeps it."""
        holders = [each for _, _, each in self._named if callable(getattr(each, "weights", None))]
        if len(holders) > 1:
            raise SpecError("train.callbacks: two of them have weights of their own", next_step="keep one")
        self._holder = holders[0] if holders else None

    def __bool__(self) -> bool:
        return bool(self._named)

    @property
    def training(self) -> Training:
        """What they see; set with `begin`."""
        assert self._training is not None
        return self._training

    def begin(self, training: Training) -> None:
        """Let them see `training` from now on."""
        self._training = training

    def call(self, hook: str, *given: Any) -> None:
        """Call a method of all that have it.

        Raises:
            TrainingError: one fails; the user's file and line are named.
        """
        for _, name, each in self._named:
            method = getattr(each, hook, None)
            if callable(method):
                # When these are called depends on stops and clocks.
                kept = keeping_rng(self.training.device) if hook in ("start", "checkpoint", "logged") else nullcontext()
                with kept, Recipe(each, name).reraise_as_user_error(f"{hook}()"):
                    method(self.training, *given)

    def has(self, hook: str) -> bool:
        """Whether one of them has this method."""
        return any(callable(getattr(each, hook, None)) for _, _, each in self._named)

    def after_step(self, state: TrainState, *, epoch_done: bool) -> None:
        """A step is done, and with it perhaps an epoch."""
        if self._named:
            self.training.steps, self.training.epochs = state.step, state.epoch
            self.call("step")
            if epoch_done:
                self.call("epoch")

    @property
    def wants_end(self) -> bool:
        """Whether one of this rank's has called `stop`."""
        return self._training is not None and self._training.stop_reason is not None

    def may_end_alone(self, group: Group) -> bool:
        """Whether the ranks must meet in every step, so that all end at the same one."""
        if group.world_size == 1:
            return self.wants_end
        watched = [each for _, name, each in self._named if ":" in name]
        return any(callable(getattr(each, hook, None)) for each in watched for hook in ("gradients", "step", "epoch"))

    def end(self, group: Group) -> None:
        """Training ends here, because a rank wants it. A collective."""
        reasons = [own["reason"] for own in group.everyones({"reason": self.training.stop_reason or ""})]
        self.ended = next(reason for reason in reasons if reason)

    def agreed_to_end(self, group: Group) -> bool:
        """Whether any rank wants to end. A collective where there are callbacks."""
        return bool(self._named) and group.sum([float(self.wants_end)])[0] > 0

    @property
    def without_state(self) -> dict[str, object]:
        """Those that a checkpoint keeps nothing of, by name."""
        return {name: each for _, name, each in self._named if not callable(getattr(each, "state_dict", None))}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of them."""
        states = {key: each.state_dict() for key, _, each in self._named if callable(getattr(each, "state_dict", None))}
        return {"states": states, "ended": self.ended}

    def load_state_dict(self, saved: Mapping[str, Any], weights: Mapping[str, Tensor], *, same: bool) -> None:
        """Give each its own state again; one that is new has none.

        Args:
            weights: those of the checkpoint's model file.
            same: the callbacks did not change, so that an end that they asked for is kept.
        """
        self.ended = saved["ended"] if same else None
        for key, name, each in self._named:
            if key in saved["states"]:
                with Recipe(each, name).reraise_as_user_error("load_state_dict()"):
                    each.load_state_dict(saved["states"][key])
        if self._holder is not None and callable(getattr(self._holder, "load_weights", None)):
            self._holder.load_weights(weights)

    def weights(self) -> dict[str, Tensor]:
        """Weights to show instead of the trained ones, by name; none where no callback has some."""
        return self._holder.weights() if self._holder is not None else {}

    @contextmanager
    def showing(self, model: nn.Module) -> Iterator[None]:
        """The model with those weights, for a while."""
        shown = self.weights()
        now = model.state_dict()
        trained = {name: now[name].detach().clone() for name in shown}
        with torch.no_grad():
            for name, value in shown.items():
                now[name].copy_(value)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in trained.items():
                    now[name].copy_(value)


def load_callbacks(entries: Sequence[CallbackCode]) -> Callbacks:
    """Make the callbacks of a rank; plain data travels to it.

    Raises:
        SpecError: one cannot be loaded or made, or has no method that would be called.
    """
    return Callbacks([(entry.name, _made(entry)) for entry in entries])


def _made(entry: CallbackCode) -> Any:
    kind = CALLBACKS.get(entry.name) if entry.code is None else entry.code.load()
    params = entry.params if entry.code is None else entry.code.located(entry.params)
    if not isinstance(kind, type):
        raise SpecError(f"train.callbacks: {entry.name} is a {type(kind).__name__}, not a class")
    if not any(callable(getattr(kind, hook, None)) for hook in (*HOOKS, "weights")):
        raise SpecError(f"train.callbacks: {entry.name} has none of the methods that are called: {', '.join(HOOKS)}")
    if callable(getattr(kind, "state_dict", None)) != callable(getattr(kind, "load_state_dict", None)):
        raise SpecError(f"train.callbacks: {entry.name} has one of state_dict() and load_state_dict(); it needs both, or none")
    try:
        return kind(**params)
    except TypeError as error:
        raise SpecError(f"train.callbacks: {entry.name} cannot be made with {entry.params}: {error}") from error
