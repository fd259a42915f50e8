"""Several optimizers, or several schedules, saved and loaded as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Several"]


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
