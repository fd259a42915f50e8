"""How is something done once, on the cluster and with what one training worker has? The driver's machine may be small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, WorkerCrashedError

from penstock.errors import TrainingError
from penstock.ingest.ray_tasks import raising_the_original
from penstock.training.spec import TrainSpec

__all__ = ["gpus_per_worker", "on_one_worker"]


T = TypeVar("T")


def gpus_per_worker(spec: TrainSpec) -> float:
    """What `train.gpus` comes to on the cluster this process is connected to."""
    if spec.gpus == 0:
        return 0.0
    there = ray.cluster_resources().get("GPU", 0.0)
    if spec.gpus == "auto" and there < spec.workers:
        return 0.0
    return 1.0 if spec.gpus == "auto" else float(spec.gpus)


def on_one_worker(spec: TrainSpec, what: str, work: Callable[[], T]) -> T:
    """Call `work` in a Ray task and wait for it. Runs in the driver.

    Args:
        spec: how many CPUs and GPUs a worker has.
        what: is done, for an error.
        work: pickles; it sees the worker's GPUs and no others.

    Raises:
        TrainingError: the task's process died.
    """
    task: Any = ray.remote(max_retries=1)(_call).options(num_cpus=spec.cpus_per_worker, num_gpus=gpus_per_worker(spec))
    try:
        with raising_the_original():
            result: T = ray.get(task.remote(work))
    except (OutOfMemoryError, WorkerCrashedError) as error:
        raise TrainingError(
            f"{what}: the process on the cluster died: {str(error).strip().splitlines()[0]}",
            next_step="look at the memory of the cluster's nodes, then run the same command again",
        ) from error
    return result


def _call(work: Callable[[], T]) -> T:
    return work()
