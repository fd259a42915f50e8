"""Several optimizers, or several schedules, saved and loaded as one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["SeveralOptimizers", "SeveralSchedules"]


class SeveralOptimizers:
    """Named optimizers as one, in the order of their names. The recipe steps them.

    Args:
        parts: by name.
    """

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        self.parts = dict(sorted(parts.items()))

    @property
    def kind(self) -> str:
        """Their classes: `critic: Adam, generator: SGD`."""
        return ", ".join(f"{name}: {type(part).__name__}" for name, part in self.parts.items())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All parameter groups, in the order of the optimizers."""
        return [group for part in self.parts.values() for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Each parameter's state."""
        return {parameter: state for part in self.parts.values() for parameter, state in part.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """Merge the states; parameters are numbered through all optimizers."""
        state, groups, first = {}, [], 0
        for part in self.parts.values():
            own = part.state_dict()
            state.update({first + index: values for index, values in own["state"].items()})
            groups += [{**group, "params": [first + index for index in group["params"]]} for group in own["param_groups"]]
            first += sum(len(group["params"]) for group in own["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the part of each.

        Raises:
            ValueError: the numbers of groups or parameters differ.
        """
        groups, first = iter(saved["param_groups"]), 0
        for name, part in self.parts.items():
            own = list(itertools.islice(groups, len(part.param_groups)))
            count = sum(len(group["params"]) for group in own)
            state = {index - first: values for index, values in saved["state"].items() if first <= index < first + count}
            shifted = [{**group, "params": [index - first for index in group["params"]]} for group in own]
            try:
                part.load_state_dict({"state": state, "param_groups": shifted})
            except ValueError as error:
                raise ValueError(f"optimizer {name!r}: {error}") from error
            first += count
        if next(groups, None) is not None:
            raise ValueError("the checkpoint has more parameter groups")


class SeveralSchedules:
    """Named schedules that step together."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = dict(sorted(parts.items()))

    def step(self) -> None:
        """Step all."""
        for part in self.parts.values():
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Collect the states by name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the state of each."""
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
