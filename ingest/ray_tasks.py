"""How is one function run over many items, on a Ray cluster or in this process?

Both have the same signature; results come in the order of completion.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Protocol, TypeVar

from penstock.errors import PenstockError, PreflightError, ServiceError
from penstock.ingest.prepare import ANYWHERE, PrepareSpec, living_nodes, most_resources, nodes_refused
from penstock.ingest.task_counts import counting
from penstock.machine.prints import keeping_prints, print_again, printed_before
from penstock.redact import first_line, hiding_secrets

__all__ = [
    "ParallelMap",
    "local_map",
    "processes_at_once",
    "raising_ours",
    "raising_the_original",
    "ray_map",
    "ray_streams",
    "ray_task",
    "refuse_nowhere",
]

Item = TypeVar("Item")

Result = TypeVar("Result")


class ParallelMap(Protocol):
    """Runs `fn` on every item and yields the results, in any order. The first error ends it."""

    def __call__(self, fn: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Run."""


def local_map(fn: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Run `fn` on one item after the other in this process: for samples and tests, without Ray."""
    yield from map(fn, items)


def ray_map(
    fn: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    where: PrepareSpec = ANYWHERE,
    count: Callable[[str, dict[str, float]], None] = lambda _node, _counts: None,
    keeps_gpus: bool = False,
) -> Iterator[Result]:
    """Run `fn` as Ray tasks, one per item. Ray must be initialised, and its workers able to import these packages.

    Plain tasks, because Ray Data takes up to two seconds to begin, and no rows come back. A task whose worker dies is run
    again, three times. After a failure no more tasks are submitted, and the running ones are awaited, so that they do not run
    beside the next try. The output of an item is printed by this process once the item is done.

    Args:
        where: what a task takes, and on which nodes they run.
        count: called with each finished task's node and counts (penstock.ingest.task_counts).
        keeps_gpus: a process keeps the memory of its GPU from item to item.

    Raises:
        Exception: the error of `fn`, as it was raised; errors of Ray itself as in `raising_ours`.
        PreflightError: no node can run a task.
    """
    import ray
    from ray.exceptions import OutOfMemoryError, RayTaskError, WorkerCrashedError

    refuse_nowhere(where)
    max_calls = 1 if where.gpus and not keeps_gpus else 0
    task, waiting = _task(max_calls).options(scheduling_strategy="SPREAD", **where.options()), iter(items)
    running: list[Any] = []
    with raising_ours():
        shared = ray.put(fn)
        while True:
            room = _room(running, _in_flight(where))
            running += [task.remote(shared, item) for item in itertools.islice(waiting, room)]
            if not running:
                return
            done, running = ray.wait(running)
            try:
                result, printed, counts = ray.get(done[0])
            except (RayTaskError, WorkerCrashedError, OutOfMemoryError) as error:  # without Ray, `wait` would not end
                print_again(printed_before(error))
                if running:
                    ray.wait(running, num_returns=len(running), fetch_local=False)
                raise
            print_again(printed)
            count(*counts)
            yield result


def ray_streams(
    fn: Callable[[Item], Iterator[Any]],
    items: Sequence[Item],
    *,
    where: PrepareSpec = ANYWHERE,
    cpus: float = 1,
    at_once: int | None = None,
    ahead: int | None = None,
) -> Iterator[Iterator[Any]]:
    """Run the generator function `fn` as Ray tasks, one per item, and yield each one's object references, in the items' order.

    A task whose worker dies is run again, three times, and continues after its consumed results: `fn` must yield equal results
    every time. If reading stops, no more tasks are submitted; the submitted ones run to their end without waiting for a reader,
    or to the end of this process.

    Args:
        where: what a task takes, and holds while it waits for its reader, and on which nodes they run.
        cpus: CPUs of a task if `where` sets none.
        at_once: most submitted tasks; None for twice as many as the cluster runs.
        ahead: results that a task makes before it waits for its reader; None for all. Needs `at_once`, with CPUs for all of
            these tasks: otherwise a restarted task could wait for a task that waits for its reader.
    """
    import ray

    refuse_nowhere(where, cpus)
    options: dict[str, Any] = {"scheduling_strategy": "SPREAD", "_generator_backpressure_num_objects": ahead or -1}
    task, shared, waiting = _stream().options(**where.options(cpus), **options), ray.put(fn), iter(items)
    running = deque[Iterator[Any]]()
    while True:
        room = _room(running, at_once or _in_flight(where, cpus))
        running.extend(task.remote(shared, item) for item in itertools.islice(waiting, room))
        if not running:
            return
        yield running[0]
        running.popleft()


def ray_task(fn: Any, item: Any, *after: Any, where: PrepareSpec = ANYWHERE, cpus: float = 1) -> list[Any]:
    """Start a Ray task, and return references to the list of what a generator function yields, and to the task's end.

    Args:
        fn: a reference to the generator function, which gets `item`.
        after: a reference to another task's end, which it waits for without CPUs.
        where: what a task takes, and on which nodes it runs.
        cpus: CPUs of a task if `where` sets none.
    """
    found: list[Any] = _whole().options(scheduling_strategy="SPREAD", **where.options(cpus)).remote(fn, item, *after)
    return found


@functools.cache
def _task(max_calls: int) -> Any:
    """Return one remote function for all calls: Ray keeps each decorated function until the job ends.

    Args:
        max_calls: calls after which a process ends (1 frees the memory of its GPU for training); 0 for no limit.
    """
    import ray

    @ray.remote(max_calls=max_calls)
    def call(fn: Callable[[Any], Any], item: Any) -> tuple[Any, list[str], tuple[str, dict[str, float]]]:
        with counting() as counts, keeping_prints() as printed, hiding_secrets():
            result = fn(item)
        return result, printed.take(), counts()

    return call


@functools.cache
def _stream() -> Any:
    import ray

    @ray.remote(num_returns="streaming")
    def call(fn: Callable[[Any], Iterator[Any]], item: Any) -> Iterator[Any]:
        with hiding_secrets():
            for result in fn(item):  # noqa: UP028 - Ray sends values in, which not every iterator accepts
                yield result

    return call


@functools.cache
def _whole() -> Any:
    import ray

    @ray.remote(num_returns=2)
    def call(fn: Callable[[Any], Iterator[Any]], item: Any, *_after: None) -> tuple[list[Any], None]:
        with hiding_secrets():
            return list(fn(item)), None

    return call


def _room(running: Sized, limit: int) -> int:
    """Return how many more tasks may be submitted: 0 if the cluster has shrunk."""
    return max(0, limit - len(running))


def _in_flight(where: PrepareSpec, cpus: float = 1) -> int:
    """Return the most submitted tasks: twice the running ones, so that an autoscaler sees tasks that wait; or `concurrency`.

    Not all tasks, because they cannot be taken back: `ray.cancel` of a task that ends at the same moment aborts the submitting
    process (Ray 2.60, "Tried to complete task that was not pending").
    """
    import ray

    if where == ANYWHERE:
        return max(2, 2 * int(ray.cluster_resources().get("CPU", 0) / cpus))
    room = max(2, 2 * where.at_once(living_nodes(), cpus))
    return room if where.concurrency is None else min(room, where.concurrency)


def refuse_nowhere(where: PrepareSpec, cpus: float = 1) -> None:
    """Raise PreflightError if no node can run a task."""
    if where != ANYWHERE and (refusal := nodes_refused(where, living_nodes(), most_resources(), cpus=cpus)) is not None:
        raise refusal


def processes_at_once(gpus: float = 0.0) -> int:
    """Return the CPUs of the cluster, or the processes of so many GPUs that it holds; 1 if Ray is not initialised."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return 1
    there = ray.cluster_resources()
    return max(1, int(there.get("GPU", 1) / gpus if gpus else there.get("CPU", 1)))


@contextlib.contextmanager
def raising_the_original() -> Iterator[None]:
    """Raise a worker's PenstockError or OSError instead of Ray's wrapper, which becomes its cause."""
    from ray.exceptions import RayTaskError

    try:
        yield
    except RayTaskError as error:
        cause: BaseException = error
        while isinstance(cause, RayTaskError) and isinstance(cause.cause, BaseException):
            cause = cause.cause
        if isinstance(cause, PenstockError | OSError):
            raise cause from error
        raise


@contextlib.contextmanager
def raising_ours() -> Iterator[None]:
    """Do as `raising_the_original`, and convert Ray's own errors to errors with a next step. For the driver.

    In a training worker Ray's own errors must stay: Ray Train restarts the worker.

    Raises:
        PreflightError: a process died more often than Ray restarts it.
        ServiceError: Ray lost the work, and another try may succeed.
    """
    from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError, RayTaskError, WorkerCrashedError

    try:
        with raising_the_original():
            yield
    except RayTaskError:
        raise
    except (WorkerCrashedError, OutOfMemoryError, ActorDiedError) as error:
        raise PreflightError(
            "a process on the cluster died each time it was started: it crashed, or was killed (by hand, or for its memory): "
            f"{first_line(error)}",
            next_step="check the memory of the nodes and the code that runs there; the same command continues",
        ) from error
    except RayError as error:
        raise ServiceError(
            f"Ray lost the running work: {type(error).__name__}: {first_line(error)}",
            next_step="check the nodes of the cluster; the same command continues",
        ) from error
