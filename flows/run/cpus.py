"""How many logical CPUs and GPUs does a run need at once, and what if the cluster has fewer?"""

from __future__ import annotations

from penstock.errors import PreflightError
from penstock.tasks.spec import PipelineSpec

__all__ = ["cpus_needed", "cpus_refused", "gpus_refused", "held_by_workers"]


def cpus_needed(spec: PipelineSpec) -> float:
    """CPUs a run needs at once: its workers, and some beside them for data tasks, at least one."""
    return held_by_workers(spec) + max(1.0, _needed_by_streams(spec))


def cpus_refused(spec: PipelineSpec, cluster_cpus: float) -> PreflightError | None:
    """The refusal if a cluster of so many CPUs cannot hold the workers and their streams; None if it can.

    With `cache: disk` and `memory` all rows are prepared before the workers start, and reading them takes no tasks.
    """
    workers, streams = held_by_workers(spec), _needed_by_streams(spec)
    if workers + streams <= cluster_cpus:
        return None
    extra, advice = "", "lower train.workers or train.cpus_per_worker, or add nodes"
    if streams:
        extra, advice = f" plus {streams:g} for the tasks of their streams", f"use materialize.cache: disk or memory, {advice}"
    return PreflightError(
        f"{spec.train.workers} workers of {spec.train.cpus_per_worker:g} CPUs{extra} need {workers + streams:g} CPUs; "
        f"the Ray cluster has {cluster_cpus:g}: they would wait for each other without end",
        next_step=advice,
    )


def gpus_refused(spec: PipelineSpec, gpus: float) -> PreflightError | None:
    """The refusal if there are fewer GPUs than the spec asks for by number; None if there are enough."""
    if not isinstance(spec.train.gpus, int) or spec.train.gpus * spec.train.workers <= gpus:
        return None
    return PreflightError(
        f"{spec.train.workers} workers with train.gpus: {spec.train.gpus} need {spec.train.gpus * spec.train.workers} GPUs; "
        f"there are {gpus:g}",
        next_step="lower train.gpus or train.workers, or use train.gpus: auto, which takes what there is",
    )


def held_by_workers(spec: PipelineSpec) -> float:
    """CPUs that the training workers keep for themselves."""
    return spec.train.workers * spec.train.cpus_per_worker


def _needed_by_streams(spec: PipelineSpec) -> float:
    if spec.materialize.cache != "none":
        return 0.0
    # It loads Ray Data and torch, and an early start of Ray must not wait for them.
    from penstock.ingest.feed.stream import streams_cpus

    return streams_cpus(spec.train.workers)
