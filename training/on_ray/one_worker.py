"""How is something done once, on the cluster and with what one training worker has? The driver's machine may be small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, WorkerCrashedError

from penstock.errors import TrainingError
from penstock.ingest.ray_tasks import raising_ours
from penstock.redact import first_line
from penstock.training.events import Event, Notice, Warned
from penstock.training.on_ray.resources import gpus_of_auto
from penstock.training.on_ray.silence import Cluster
from penstock.training.spec import TrainSpec

__all__ = ["needs_of_one_worker", "on_one_worker"]


T = TypeVar("T")


def needs_of_one_worker(spec: TrainSpec) -> tuple[dict[str, float], list[Event]]:
    """CPUs and GPUs of a worker on the cluster this process is connected to, and what is told of the choice of `gpus: auto`."""
    chosen: list[Event] = []
    if spec.gpus == "auto":
        cluster = Cluster()
        nodes = [node.resources for node in cluster.nodes() if node.alive]
        gpus, why, warns = gpus_of_auto(spec.workers, spec.cpus_per_worker, nodes, cluster.most())
        chosen.append(Warned(message=why) if warns else Notice(message=why))
    else:
        gpus = float(spec.gpus)
    return {"CPU": spec.cpus_per_worker} | ({"GPU": gpus} if gpus else {}), chosen


def on_one_worker(spec: TrainSpec, what: str, work: Callable[[], T]) -> T:
    """Call `work` in a Ray task and wait for it. Runs in the driver.

    Args:
        spec: how many CPUs and GPUs a worker has.
        what: is done, for an error.
        work: pickles; it sees the worker's GPUs and no others.

    Raises:
        TrainingError: the task's process died.
        ServiceError: Ray lost it in another way.
    """
    need, _ = needs_of_one_worker(spec)
    task: Any = ray.remote(max_retries=1)(_call).options(num_cpus=need["CPU"], num_gpus=need.get("GPU", 0.0))
    with raising_ours():
        try:
            result: T = ray.get(task.remote(work))
        except (OutOfMemoryError, WorkerCrashedError) as error:
            raise TrainingError(
                f"{what}: the process on the cluster died: {first_line(error)}",
                next_step="look at the memory of the cluster's nodes, then run the same command again",
            ) from error
    return result


def _call(work: Callable[[], T]) -> T:
    return work()
