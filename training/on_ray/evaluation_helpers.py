"""How do free workers of the cluster help to measure a large split? Runs in the process that measures."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import ray
import torch

from penstock.machine.prints import keeping_prints, print_again
from penstock.redact import hiding_secrets
from penstock.storage import Storage
from penstock.training.evaluation.split_measures import Helper, MeasuredBatches
from penstock.training.job import TrainJob
from penstock.training.model import ModelSpec, TrainedModel, load_model
from penstock.training.on_ray.resources import room_for
from penstock.training.on_ray.watcher import Cluster
from penstock.training.open_feeds import StreamFeeds

__all__ = ["can_share_out", "start_helpers"]

FEWEST_BATCHES = 64
"""Batches of one process: a helper takes 5 to 10 s to start."""

Measure = Callable[[TrainedModel, int, int], MeasuredBatches]


def can_share_out(job: TrainJob) -> bool:
    """Whether a process can begin to read a split at any of its batches."""
    return job.order.by_length is None and not isinstance(job.open_feeds, StreamFeeds)


def start_helpers(
    model: ModelSpec, files: Storage, measure: Measure, batches: int, *, fewest_batches: int = FEWEST_BATCHES
) -> list[Helper]:
    """Start a helper for each free place, with as many CPUs and GPUs as this process has; the first batches stay here.

    Args:
        measure: counts the batches between two numbers with a loaded model.
        batches: of the split.
    """
    own = ray.get_runtime_context().get_assigned_resources()
    need = {name: own[name] for name in ("CPU", "GPU") if own.get(name)}
    places = max(1, min(room_for(need, [Cluster().free()]) + 1, batches // fewest_batches))
    edges = [batches * part // places for part in range(places + 1)]
    task: Any = ray.remote(max_retries=1)(_measure)
    task = task.options(num_cpus=need.get("CPU", 0.0), num_gpus=need.get("GPU", 0.0))
    return [
        Helper(first, last, partial(_result, task.remote(measure, model, files, first, last, torch.get_num_threads())))
        for first, last in itertools.pairwise(edges[1:])
    ]


def _result(answer: Any) -> MeasuredBatches | None:
    try:
        counts, printed = ray.get(answer)
    except Exception:  # its process died, or user code failed: then it fails here, too
        return None
    print_again(printed)
    return cast("MeasuredBatches", counts)


def _measure(
    measure: Measure, model: ModelSpec, files: Storage, first: int, last: int, threads: int
) -> tuple[MeasuredBatches, list[str]]:
    with keeping_prints() as printed, hiding_secrets():
        torch.set_num_threads(threads)
        counts = measure(load_model(model, files), first, last)
    return counts, printed.take()
