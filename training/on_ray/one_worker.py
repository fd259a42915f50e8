"""How does a function run once on the cluster, with the CPUs and GPUs of one training worker?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.errors import TrainingError
from penstock.ingest.prepare import most_resources
from penstock.ingest.ray_tasks import raising_ours
from penstock.machine.prints import keeping_prints, print_again, printed_before
from penstock.redact import first_line, hiding_secrets
from penstock.training.events import Event, Notice, Warned
from penstock.training.on_ray.resources import gpus_of_auto
from penstock.training.on_ray.watcher import Cluster, Watcher
from penstock.training.spec import TrainSpec

__all__ = ["on_one_worker", "worker_needs"]

T = TypeVar("T")

POLL_S = 0.3

_CANCEL_S = 10.0
"""A node that does not answer must not keep the command."""


def worker_needs(spec: TrainSpec) -> tuple[dict[str, float], list[Event]]:
    """Return a worker's resources on the cluster of this process, and an event for the choice of `gpus: auto`."""
    chosen: list[Event] = []
    if spec.gpus == "auto":
        gpus, why, warns = gpus_of_auto(spec.workers, spec.cpus_per_worker, Cluster().nodes(), most_resources())
        chosen.append(Warned(message=why) if warns else Notice(message=why))
    else:
        gpus = float(spec.gpus)
    return {"CPU": spec.cpus_per_worker} | ({"GPU": gpus} if gpus else {}) | spec.resources, chosen


def on_one_worker(
    spec: TrainSpec, name: str, work: Callable[[], T], show: Callable[[str], None], *, has_trained: bool = False
) -> T:
    """Call `work` in a Ray task and wait for it: the driver's machine may be small. Runs in the driver.

    Args:
        spec: a worker's CPUs and GPUs, and the timeout of the wait for them.
        name: of the work, for messages.
        work: pickles; it sees the worker's GPUs and no others.
        show: prints a line: the work runs on CPUs as `gpus: auto` found no GPU, or it waits for something.
        has_trained: where it needs CPUs alone, do not queue behind runs that wait to begin: after the first line about the
            wait, the work shares the CPUs of a node with others.

    Raises:
        TrainingError: the task's process died, or could not be placed for `train.wait_s`.
        ServiceError: Ray lost it in another way.
    """
    need, chosen = worker_needs(spec)
    if "GPU" not in need:
        _announce(chosen, name, show)
    task: Any = ray.remote(max_retries=1, num_returns="streaming")(_call)
    own = {name: amount for name, amount in need.items() if name not in ("CPU", "GPU", "memory")}
    parts = task.options(
        num_cpus=need["CPU"], num_gpus=need.get("GPU", 0.0), memory=need.get("memory"), resources=own or None
    ).remote(work)
    with raising_ours():
        watcher = Watcher(spec.model_copy(update={"workers": 1}), need)
        if not _has_started(parts, watcher, name, show, gives_up=has_trained and list(need) == ["CPU"]):
            _cancel(parts)
            parts = task.options(num_cpus=0, scheduling_strategy=_on_node_with(need["CPU"])).remote(work)
            _has_started(parts, watcher, name, show, gives_up=False)
        try:
            ray.get(next(parts))
            result, printed = ray.get(next(parts))
            print_again(printed)
        except RayTaskError as error:
            print_again(printed_before(error))
            raise
        except (OutOfMemoryError, WorkerCrashedError) as error:
            raise TrainingError(
                f"{name}: the process on the cluster died: {first_line(error)}",
                next_step="look at the memory of the cluster's nodes, then run the same command again",
            ) from error
    return cast("T", result)


def _has_started(parts: Any, watcher: Watcher, name: str, show: Callable[[str], None], *, gives_up: bool) -> bool:
    """Wait until the work begins, or, with `gives_up`, for the first line about the wait."""
    while not ray.wait([parts], timeout=POLL_S)[0]:
        try:
            due = watcher.due()
        except TrainingError:
            _cancel(parts)  # it must not begin later
            raise
        _announce(due, name, show)
        if due and gives_up:
            show(f"{name}: begins beside the others, whose CPUs it shares: its run has trained")
            return False
    return True


def _cancel(parts: Any) -> None:
    """Cancel work that may have begun meanwhile, and take the error of its end, which Ray would print as unhandled."""
    ray.cancel(parts, force=True)  # a forked process does not react to the gentle way
    with suppress(RayError, StopIteration):
        while ray.wait([parts], timeout=_CANCEL_S)[0]:
            ray.get(next(parts))


def _on_node_with(cpus: float) -> Any:
    """Place a task on a node that has so many CPUs, free or not; the head of a cluster may have none, and little memory."""
    found = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0.0) >= cpus]
    return NodeAffinitySchedulingStrategy(found[-1], soft=True) if found else "SPREAD"


def _announce(events: list[Event], name: str, show: Callable[[str], None]) -> None:
    for event in events:
        if isinstance(event, Notice | Warned):
            show(f"{name}: {event.message}")


def _call(work: Callable[[], T]) -> Iterator[tuple[T, list[str]] | None]:
    """Yield None when the work begins, then its result with the lines that it printed."""
    yield None
    with keeping_prints() as printed, hiding_secrets():
        result = work()
    yield result, printed.take()
