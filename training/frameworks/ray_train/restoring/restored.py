"""What did a loop not restore of the checkpoint that it continues from, as far as that can be seen, and which two lines do it?

Seen is whether it asked for the checkpoint and opened it, and whether a torch optimizer that keeps a state began without one,
which counts where witness.py has nothing to compare.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.fs
import ray.train
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["Restored"]


class Restored:
    """Looks on while one rank's loop runs.

    Args:
        folder: of the checkpoint that it continues from, unpacked.
    """

    def __init__(self, folder: Path) -> None:
        self.checkpoint = _Watched(str(folder))
        """What `get_checkpoint` gives."""
        self.asked = False
        """Whether it was called."""
        self._seen: set[int] = set()
        self._empty: set[int] = set()
        self._anew: dict[str, None] = {}
        """Names of the classes of optimizers that have a state now and had none at their first step."""
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        files = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
        self._read = f"torch.load(checkpoint.path + '/{next(files, 'state.pt')}')"

    def missing(self) -> list[str]:
        """Reasons why what follows may not be what an undisturbed run would do, each with the lines to add."""
        if not self.asked:
            return [
                "train_func did not ask for its checkpoint: add before its loop `checkpoint = ray.train.get_checkpoint()` and "
                f"`if checkpoint: model.load_state_dict({self._read}['model'])`"
            ]
        if not self.checkpoint.opened:
            return [
                f"train_func did not open the checkpoint that it asked for: add `state = {self._read}` and "
                "`model.load_state_dict(state['model'])`"
            ]
        return [
            f"{name} began without its state: add `state['optimizer'] = optimizer.state_dict()` where it reports and "
            "`optimizer.load_state_dict(state['optimizer'])` where it restores"
            for name in self._anew
        ]

    def close(self) -> None:
        """Look no longer."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: Optimizer, *_given: Any) -> None:
        if id(optimizer) not in self._seen:
            self._seen.add(id(optimizer))
            if not any(optimizer.state.values()):
                self._empty.add(id(optimizer))

    def _after_step(self, optimizer: Optimizer, *_given: Any) -> None:
        if id(optimizer) in self._empty:
            self._empty.discard(id(optimizer))
            if any(optimizer.state.values()):
                self._anew[type(optimizer).__name__] = None


class _Watched(ray.train.Checkpoint):  # type: ignore[misc]  # Ray ships no types for it
    """A checkpoint in a folder that knows whether its path was ever asked for, which all ways to its files do."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, pyarrow.fs.LocalFileSystem())
        self.opened = False

    @property
    def path(self) -> str:
        """Of the folder."""
        self.opened = True
        return self._folder

    @path.setter
    def path(self, path: str) -> None:
        self._folder = path
