"""How is one function run over many items, on a Ray cluster or in this process?

Both ways have one signature, so that what uses them does not know which it is: results come in the order they are done.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from penstock.errors import PenstockError

__all__ = ["ParallelMap", "import_ahead", "local_map", "raising_the_original", "ray_map", "ray_streams"]

Item = TypeVar("Item")
Result = TypeVar("Result")


class ParallelMap(Protocol):
    """Runs `fn` on every item and yields the results, in any order. The first error ends it."""

    def __call__(self, fn: Callable[[Item], Result], items: Sequence[Item], *, num_cpus: float = 1) -> Iterator[Result]:
        """Run; `num_cpus` is what one call needs of the cluster."""


def local_map(fn: Callable[[Item], Result], items: Sequence[Item], *, num_cpus: float = 1) -> Iterator[Result]:
    """Run `fn` on one item after the other in this process: for samples and tests that are not worth starting Ray."""
    yield from map(fn, items)


def ray_map(fn: Callable[[Item], Result], items: Sequence[Item], *, num_cpus: float = 1) -> Iterator[Result]:
    """Run `fn` as Ray tasks, one per item. Ray must be initialised, and its workers able to import these packages.

    Plain tasks, because Ray Data takes up to two seconds to begin, and has nothing to do where no rows come back. A task whose
    worker dies is run again. After an error nothing more is begun; what runs already runs to its end.

    Raises:
        Exception: what `fn` raised, as it was raised; errors of Ray itself as they are.
    """
    import ray

    @ray.remote(num_cpus=num_cpus, scheduling_strategy="SPREAD")
    def call(item: Item) -> Result:
        return fn(item)

    waiting = iter(items)
    running: list[ray.ObjectRef[Result]] = []
    while True:
        running += [call.remote(item) for item in itertools.islice(waiting, _in_flight(num_cpus) - len(running))]  # type: ignore[arg-type]
        if not running:
            return
        with raising_the_original():
            done, running = ray.wait(running)
            yield ray.get(done[0])


def ray_streams(
    fn: Callable[[Item], Iterator[Any]],
    items: Sequence[Item],
    *,
    num_cpus: float = 1,
    at_once: int | None = None,
    ahead: int | None = None,
) -> Iterator[Iterator[Any]]:
    """Run the generator function `fn` as Ray tasks, one per item, and give each one's object references, in the items' order.

    A task whose worker dies is run again, and goes on behind what was read of it: `fn` must give equal results every time.
    Where nobody reads on, nothing more is begun; what runs already runs to its end, or to that of this process.

    Args:
        num_cpus: CPUs one task asks for, and holds while it waits for its reader.
        at_once: how many run at a time; None for as many as the cluster has CPUs for.
        ahead: how many results a task makes before it waits for its reader; None for all.
    """
    import ray

    @ray.remote(num_returns="streaming", num_cpus=num_cpus)
    def call(item: Item) -> Iterator[Any]:
        for result in fn(item):  # noqa: UP028 - Ray sends values in, which not every iterator takes
            yield result

    task: Any = call if ahead is None else call.options(_generator_backpressure_num_objects=ahead)
    waiting, running = iter(items), deque[Iterator[Any]]()
    while True:
        room = (at_once or _in_flight(num_cpus)) - len(running)
        running.extend(task.remote(item) for item in itertools.islice(waiting, room))
        if not running:
            return
        yield running[0]
        running.popleft()


def _in_flight(num_cpus: float) -> int:
    """How many tasks are handed to Ray at a time: those that run, and as many more, whom an autoscaler sees waiting.

    Not all, for there is no taking them back. `ray.cancel` of a task that ends at that moment aborts the process that began it
    (Ray 2.60, "Tried to complete task that was not pending"), and tasks over broken files end at one moment.
    """
    import ray

    return max(2, 2 * int(ray.cluster_resources().get("CPU", 0) / num_cpus))


def import_ahead() -> None:
    """Let one of Ray's processes import what prepares rows, and come to wait for `ray_map` with it. Returns at once.

    A first task begins 0.7 s sooner; the imports run beside whatever the driver does meanwhile, at Ray's lower priority.
    """
    import ray

    @ray.remote(num_cpus=1, max_retries=0)
    def load() -> None:
        for name in ("ingest.preprocess", "ingest.materialize"):
            importlib.import_module(name)

    load.remote()


@contextlib.contextmanager
def raising_the_original() -> Iterator[None]:
    """Raise what a function raised in a worker, instead of Ray's wrapping of it; Ray's remains as the cause."""
    from ray.exceptions import RayTaskError

    try:
        yield
    except RayTaskError as error:
        cause: BaseException = error
        while isinstance(cause, RayTaskError) and isinstance(cause.cause, BaseException):
            cause = cause.cause
        if isinstance(cause, PenstockError):
            raise cause from error
        raise
