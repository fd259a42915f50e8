"""What is the same for frameworks that train on workers of Ray? Imports no Ray: loaders of models import it, too."""

from __future__ import annotations

import contextlib
import importlib.metadata
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.training.events import Event
from penstock.training.job import TrainJob, TrainOutcome

if TYPE_CHECKING:
    from penstock.training.on_ray.worker import RankResult
    from penstock.training.ranks import Group

__all__ = ["OnWorkers", "installed"]


class OnWorkers:
    """Brings `train` of a `penstock.training.frameworks.framework.Framework`: on workers of Ray.

    Attributes:
        a_step: completes "a step is ...", if that is not a batch of `train.batch_rows` rows.
        on_cpus: train on CPUs, whatever `train.gpus` is.
        in_ray_train: train in Ray Train even where one worker alone could be a Ray task.
    """

    a_step = ""
    on_cpus = False
    in_ray_train = False

    @property
    def run_rank(self) -> Callable[..., RankResult] | None:
        """The function that each worker calls; arguments as of on_ray/worker.py's `run_rank`. None is that one."""
        return None

    def try_rank(self, job: TrainJob, group: Group, client: Any) -> int | None:
        """Train as the only rank, for `penstock check`; `job` ends after two batches.

        Returns:
            The number of batches that user code took, where it takes them itself.
        """
        from penstock.training.on_ray.worker import run_rank

        (self.run_rank or run_rank)(job, group, client)
        return None

    def train(
        self, job: TrainJob, *, stop: threading.Event, listener: Callable[[list[Event]], None], own_cluster: bool = False
    ) -> TrainOutcome:
        """See `Framework.train`."""
        from penstock.training.on_ray import trainer

        if self.on_cpus:
            job = replace(job, spec=job.spec.model_copy(update={"gpus": 0}))
        return trainer.train(
            job, stop=stop, listener=listener, own_cluster=own_cluster, work=self.run_rank, in_ray_train=self.in_ray_train
        )


def installed(*distributions: str) -> tuple[str, ...]:
    """The installed ones of these distributions."""
    there = []
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            there.append(name)
    return tuple(there)
