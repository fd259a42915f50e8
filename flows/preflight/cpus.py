"""Count the CPUs and GPUs that a run needs at once, and refuse a cluster without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.errors import PreflightError
from penstock.ingest.prepare import ClusterNode, nodes_refused
from penstock.messages import counted
from penstock.tasks.spec import PipelineSpec
from penstock.training.on_ray.resources import missing_for_workers

__all__ = ["cpus_needed", "held_by_workers", "need_of_worker", "tasks_refused", "workers_refused"]


def cpus_needed(spec: PipelineSpec) -> float:
    """Return the CPUs a run needs at once: for its workers, and at least one for data tasks."""
    return held_by_workers(spec) + max(spec.prepare.cpus or 1.0, _needed_beside(spec))


def workers_refused(
    spec: PipelineSpec, nodes: Sequence[Mapping[str, float]], most: Mapping[str, float] | None = None
) -> PreflightError | None:
    """Return the error if nodes with these resources cannot hold the workers and the tasks that run beside them, else None.

    These prepare rows with `cache: none` and `overlap`; otherwise all rows are prepared before the workers start.

    Args:
        most: resources that the nodes together can grow to, if known.
    """
    train, beside = spec.train, _needed_beside(spec)
    missing = missing_for_workers(train.workers, need_of_worker(spec), nodes, most)
    if missing is not None:
        return PreflightError(
            f"the workers would wait for ever for {missing}",
            next_step="lower train.workers or what each of them takes (train.cpus_per_worker, train.gpus, "
            "train.resources), or add nodes",
        )
    cpus = max(sum(node.get("CPU", 0.0) for node in nodes), most.get("CPU", 0.0) if most else 0.0)
    if held_by_workers(spec) + beside <= cpus:
        return None
    return PreflightError(
        f"{counted(train.workers, 'worker')} of {train.cpus_per_worker:g} CPUs plus {beside:g} for the tasks that prepare rows "
        f"need {held_by_workers(spec) + beside:g} CPUs; the Ray cluster has {cpus:g}: they would wait for each other "
        "for ever",
        next_step="use materialize.cache: disk or memory without overlap, lower train.workers or train.cpus_per_worker, or add "
        "nodes",
    )


def tasks_refused(
    spec: PipelineSpec, nodes: Sequence[ClusterNode], most: Mapping[str, float] | None = None
) -> PreflightError | None:
    """Return the error if no node can run a task that reads and prepares rows, or too few those of all streams; else None."""
    if spec.materialize.cache != "none":
        return nodes_refused(spec.preparing, nodes, most)
    from penstock.ingest.feed.stream_tasks import OPEN_STREAMS, STREAM_CPUS  # loads Ray, as `_needed_beside`

    return nodes_refused(spec.prepare, nodes, most, tasks=OPEN_STREAMS, cpus=STREAM_CPUS)


def need_of_worker(spec: PipelineSpec) -> dict[str, float]:
    """Return what a training worker takes, without the GPUs of `train.gpus: auto`."""
    gpus = {"GPU": float(spec.train.gpus)} if isinstance(spec.train.gpus, int) and spec.train.gpus else {}
    return {"CPU": spec.train.cpus_per_worker, **gpus, **spec.train.resources}


def held_by_workers(spec: PipelineSpec) -> float:
    """Return the CPUs of the training workers."""
    return spec.train.workers * spec.train.cpus_per_worker


def _needed_beside(spec: PipelineSpec) -> float:
    if spec.materialize.cache != "none":
        return (spec.prepare.cpus or 1.0) if spec.materialize.overlap is True else 0.0
    # Imported here: it loads Ray Data and torch, and an early start of Ray must not wait for them.
    from penstock.ingest.feed.stream_tasks import streams_cpus

    return streams_cpus(spec.prepare)
