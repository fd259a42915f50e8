"""How many trials fit into the cluster at once, so that none waits for CPUs that another holds?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.flows.run.cpus import held_by_workers, workers_refused
from penstock.messages import counted
from penstock.tasks.spec import PipelineSpec
from penstock.tasks.tune.spec import TuneSpec
from penstock.training.on_ray.resources import gpus_of_auto, room_for

__all__ = ["largest_trial", "trials_at_once"]

_SIZES = ("workers", "cpus_per_worker", "gpus")


def largest_trial(spec: PipelineSpec, tune: TuneSpec) -> PipelineSpec:
    """The spec with the most workers, CPUs and GPUs that the space gives a trial."""
    largest: dict[str, Any] = {}
    for name in _SIZES:
        dimension = tune.space.get(f"train.{name}")
        numbers = [value for value in dimension.extremes if isinstance(value, int | float)] if dimension else []
        if numbers:
            largest[name] = max(numbers)
    return spec.model_copy(update={"train": spec.train.model_copy(update=largest)})


def trials_at_once(
    spec: PipelineSpec, tune: TuneSpec, nodes: Sequence[Mapping[str, float]], most: Mapping[str, float] | None = None
) -> tuple[int, list[str]]:
    """How many trials run at once on these nodes; and what to say of `gpus: auto`, and where it is not what the file asks for.

    Args:
        most: what the nodes together can grow to, if that is known; more trials at once than fit now are not begun for it.

    Raises:
        PreflightError: not even one fits.
    """
    largest = largest_trial(spec, tune)
    refusal = workers_refused(largest, nodes, most)
    if refusal is not None:
        raise refusal
    train = largest.train
    said: list[str] = []
    if train.gpus == "auto":
        gpus, why, _ = gpus_of_auto(train.workers, train.cpus_per_worker, nodes, most)
        said.append(why)
    else:
        gpus = float(train.gpus)
    need = {"CPU": train.cpus_per_worker, **({"GPU": gpus} if gpus else {})}
    fit = max(1, room_for(need, nodes) // train.workers)
    if spec.materialize.cache == "none":  # the tasks of its streams need CPUs beside those of the workers
        fit = 1
    wanted = min(tune.concurrent or fit, tune.limit)
    if wanted <= fit:
        return wanted, said
    there, taken = sum(node.get("CPU", 0.0) for node in nodes), wanted * held_by_workers(largest)
    each = f"{train.workers} worker{'s' * (train.workers > 1)} of " + " and ".join(f"{n:g} {name}" for name, n in need.items())
    lowered = (
        f"{counted(fit, 'trial')} at once instead of {wanted}: a trial has {each}, {wanted} take {taken:g} CPUs of {there:g}"
    )
    return fit, [*said, lowered]
