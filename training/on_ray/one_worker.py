"""How is something done once, on the cluster and with what one training worker has? The driver's machine may be small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import OutOfMemoryError, RayTaskError, WorkerCrashedError

from penstock.errors import TrainingError
from penstock.ingest.ray_tasks import raising_ours
from penstock.machine.prints import keeping_prints, print_again, printed_before
from penstock.redact import first_line, hiding_secrets
from penstock.training.events import Event, Notice, Warned
from penstock.training.on_ray.resources import gpus_of_auto
from penstock.training.on_ray.watcher import Cluster, Watcher
from penstock.training.spec import TrainSpec

__all__ = ["needs_of_one_worker", "on_one_worker"]


T = TypeVar("T")

POLL_S = 0.3


def needs_of_one_worker(spec: TrainSpec) -> tuple[dict[str, float], list[Event]]:
    """CPUs and GPUs of a worker on the cluster this process is connected to, and an event: what `gpus: auto` chose."""
    chosen: list[Event] = []
    if spec.gpus == "auto":
        cluster = Cluster()
        nodes = [node.resources for node in cluster.nodes() if node.alive]
        gpus, why, warns = gpus_of_auto(spec.workers, spec.cpus_per_worker, nodes, cluster.most())
        chosen.append(Warned(message=why) if warns else Notice(message=why))
    else:
        gpus = float(spec.gpus)
    return {"CPU": spec.cpus_per_worker} | ({"GPU": gpus} if gpus else {}), chosen


def on_one_worker(spec: TrainSpec, what: str, work: Callable[[], T], say: Callable[[str], None]) -> T:
    """Call `work` in a Ray task and wait for it. Runs in the driver.

    Args:
        spec: how many CPUs and GPUs a worker has, and how long they are waited for.
        what: is done, for an error and what is said.
        work: pickles; it sees the worker's GPUs and no others.
        say: hears that it is done on CPUs where `gpus: auto` found no GPUs, and what is waited for.

    Raises:
        TrainingError: the task's process died, or could not be placed for `train.wait_s`.
        ServiceError: Ray lost it in another way.
    """
    need, chosen = needs_of_one_worker(spec)
    if "GPU" not in need:
        _say(chosen, what, say)
    task: Any = ray.remote(max_retries=1, num_returns="streaming")(_call)
    parts = task.options(num_cpus=need["CPU"], num_gpus=need.get("GPU", 0.0)).remote(work)
    with raising_ours():
        _wait_for_start(parts, Watcher(spec.model_copy(update={"workers": 1}), need), what, say)
        try:
            ray.get(next(parts))
            result, printed = ray.get(next(parts))
            print_again(printed)
        except RayTaskError as error:
            print_again(printed_before(error))
            raise
        except (OutOfMemoryError, WorkerCrashedError) as error:
            raise TrainingError(
                f"{what}: the process on the cluster died: {first_line(error)}",
                next_step="look at the memory of the cluster's nodes, then run the same command again",
            ) from error
    return cast("T", result)


def _wait_for_start(parts: Any, watcher: Watcher, what: str, say: Callable[[str], None]) -> None:
    while not ray.wait([parts], timeout=POLL_S)[0]:
        try:
            due = watcher.due()
        except TrainingError:
            ray.cancel(parts)  # nothing is to begin that nobody waits for
            raise
        _say(due, what, say)


def _say(events: list[Event], what: str, say: Callable[[str], None]) -> None:
    for event in events:
        if isinstance(event, Notice | Warned):
            say(f"{what}: {event.message}")


def _call(work: Callable[[], T]) -> Iterator[tuple[T, list[str]] | None]:
    """Yields nothing when it has begun, and what was done, with what was printed."""
    yield None
    with keeping_prints() as printed, hiding_secrets():
        result = work()
    yield result, printed.take()
