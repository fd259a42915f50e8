"""How does a framework's own trainer see the rows of a shard? As epochs of a known number of steps, each rank its share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from penstock.errors import SpecError
from penstock.messages import counted
from penstock.training.frameworks.ray_train.session import Session
from penstock.training.frameworks.ray_train.shard import Shard
from penstock.training.job import TrainJob
from penstock.training.ranks import Group

__all__ = ["Epochs", "train_epochs", "validation_epochs"]


class Epochs:
    """What a trainer takes for a data loader: an epoch of batches each time it is asked, from the place in the rows.

    Args:
        rows: of a step, on this rank.
        steps: of a whole epoch.
    """

    def __init__(self, shard: Shard, rows: int, steps: int) -> None:
        self._shard, self._rows, self._steps = shard, rows, steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self._shard.iter_torch_batches(batch_size=self._rows))

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the session keeps the place. With it Lightning knows that an epoch goes on in its middle."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""


def train_epochs(job: TrainJob, group: Group, session: Session) -> Epochs:
    """The train split.

    Raises:
        SpecError: an epoch's last step has fewer rows than there are workers, or its steps cannot be counted.
    """
    steps = replace(job, spec=job.spec.model_copy(update={"epochs": 1, "max_steps": None})).total_steps
    if steps is None:
        raise SpecError(
            f"shuffle.by_length does not fit {job.spec.framework}, which counts an epoch's steps before it",
            next_step="take it out",
        )
    rest = job.order.epoch_rows % job.spec.batch_rows
    if 0 < rest < group.world_size:
        raise SpecError(
            f"the last step of an epoch has {counted(rest, 'row')}, and there are {group.world_size} workers",
            next_step="take another train.batch_rows",
        )
    return Epochs(session.shard("train"), job.spec.batch_rows // group.world_size, steps)


def validation_epochs(job: TrainJob, group: Group, session: Session) -> Epochs | None:
    """The validation split, if it has rows."""
    rows = job.manifest.rows.get("validation")
    if not rows:
        return None
    whole, rest = divmod(rows, job.spec.batch_rows)
    return Epochs(session.shard("validation"), job.spec.batch_rows // group.world_size, whole + (rest >= group.world_size))
