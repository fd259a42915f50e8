"""How is one function run over many items, on a Ray cluster or in this process?

Both ways have one signature, so that what uses them does not know which it is: results come in the order they are done.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Protocol, TypeVar

from penstock.errors import PenstockError, PreflightError, ServiceError
from penstock.machine.prints import keeping_prints, print_again, printed_before
from penstock.redact import first_line, hiding_secrets

__all__ = [
    "ParallelMap",
    "cluster_cpus",
    "import_ahead",
    "local_map",
    "raising_ours",
    "raising_the_original",
    "ray_map",
    "ray_pool",
    "ray_streams",
]


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
    worker dies is run again, three times. When a task has failed no more are handed to Ray, and those it has are waited for:
    who tries again must not meet them. What an item prints is printed by this process once it is done.

    Raises:
        Exception: what `fn` raised, as it was raised; errors of Ray itself as `raising_ours` tells them.
    """
    import ray
    from ray.exceptions import OutOfMemoryError, RayTaskError, WorkerCrashedError

    task, waiting = _task().options(num_cpus=num_cpus, scheduling_strategy="SPREAD"), iter(items)
    running: list[Any] = []
    with raising_ours():
        shared = ray.put(fn)
        while True:
            room = _room(running, _in_flight(num_cpus))
            running += [task.remote(shared, item) for item in itertools.islice(waiting, room)]
            if not running:
                return
            done, running = ray.wait(running)
            try:
                result, printed = ray.get(done[0])
            except (
                RayTaskError,
                WorkerCrashedError,
                OutOfMemoryError,
            ) as error:  # not of a Ray that is gone: nothing would end
                print_again(printed_before(error))
                if running:
                    ray.wait(running, num_returns=len(running), fetch_local=False)
                raise
            print_again(printed)
            yield result


def ray_pool(
    make: Callable[[], Callable[[Item], Result]], items: Sequence[Item], *, processes: int, num_gpus: float = 0
) -> Iterator[Result]:
    """Run what `make()` returns on every item, in processes that each make it once: a model takes longer to load than to use.

    Results come in the order they are done. A process that dies is started again, three times, with the item it had. One that
    has nothing left to do ends, so that its CPU is there for one that is started again. When an item has failed no more are
    handed out, and those in hand are waited for. What an item prints is printed by this process once it is done.

    Args:
        processes: at most so many; each takes one CPU.
        num_gpus: that each of them takes. Of none it sees none, where Ray would show it all of its node.

    Raises:
        Exception: what was raised there, as it was raised; errors of Ray itself as `raising_ours` tells them.
    """
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    worker = _worker().options(num_cpus=1, num_gpus=num_gpus, max_restarts=3, max_task_retries=3, scheduling_strategy="SPREAD")
    waiting, running = iter(items), dict[Any, Any]()
    with raising_ours():
        shared = ray.put(make)  # not an argument of the constructor, which Ray could lose before it starts a process again
        for item in itertools.islice(waiting, processes):
            actor = worker.remote()
            running[actor.call.remote(shared, item)] = actor
        while running:
            (done, *_), _rest = ray.wait(list(running))
            actor = running.pop(done)
            try:
                result, printed = ray.get(done)
            except (RayTaskError, RayActorError) as error:
                print_again(printed_before(error))
                if running:
                    ray.wait(list(running), num_returns=len(running), fetch_local=False)
                raise
            for item in itertools.islice(waiting, 1):
                running[actor.call.remote(shared, item)] = actor
            del actor
            print_again(printed)
            yield result


def ray_streams(
    fn: Callable[[Item], Iterator[Any]],
    items: Sequence[Item],
    *,
    num_cpus: float = 1,
    at_once: int | None = None,
    ahead: int | None = None,
) -> Iterator[Iterator[Any]]:
    """Run the generator function `fn` as Ray tasks, one per item, and give each one's object references, in the items' order.

    A task whose worker dies is run again, three times, and goes on behind what was read of it: `fn` must give equal results
    every time. Where reading stops, no more tasks are handed to Ray; those it has run to their end without waiting for a
    reader, or to the end of this process.

    Args:
        num_cpus: CPUs one task asks for, and holds while it waits for its reader.
        at_once: how many are handed to Ray at a time; None for twice as many as the cluster has CPUs for.
        ahead: how many results a task makes before it waits for its reader; None for all. Needs `at_once`, with CPUs for
            all of them: a task that is run again would wait for one that waits for its reader.
    """
    import ray

    options: dict[str, Any] = {} if ahead is None else {"_generator_backpressure_num_objects": ahead}
    task, shared, waiting = _stream().options(num_cpus=num_cpus, **options), ray.put(fn), iter(items)
    running = deque[Iterator[Any]]()
    while True:
        room = _room(running, at_once or _in_flight(num_cpus))
        running.extend(task.remote(shared, item) for item in itertools.islice(waiting, room))
        if not running:
            return
        yield running[0]
        running.popleft()


@functools.cache
def _task() -> Any:
    """One for every function: Ray keeps what is decorated until the job ends."""
    import ray

    @ray.remote
    def call(fn: Callable[[Any], Any], item: Any) -> tuple[Any, list[str]]:
        with keeping_prints() as printed, hiding_secrets():
            result = fn(item)
        return result, printed.take()

    return call


@functools.cache
def _worker() -> Any:
    import ray

    @ray.remote
    class Worker:
        def __init__(self) -> None:
            self._fn: Callable[[Any], Any] | None = None

        def call(self, make: Callable[[], Callable[[Any], Any]], item: Any) -> tuple[Any, list[str]]:
            if not ray.get_gpu_ids():
                os.environ["CUDA_VISIBLE_DEVICES"] = ""
            with keeping_prints() as printed, hiding_secrets():
                self._fn = self._fn or make()
                result = self._fn(item)
            return result, printed.take()

    return Worker


@functools.cache
def _stream() -> Any:
    import ray

    @ray.remote(num_returns="streaming")
    def call(fn: Callable[[Any], Iterator[Any]], item: Any) -> Iterator[Any]:
        with hiding_secrets():
            for result in fn(item):  # noqa: UP028 - Ray sends values in, which not every iterator takes
                yield result

    return call


def _room(running: Sized, limit: int) -> int:
    """How many more tasks may be handed over: none where the cluster has shrunk."""
    return max(0, limit - len(running))


def _in_flight(num_cpus: float) -> int:
    """How many tasks are handed to Ray at a time: those that run, and as many more, whom an autoscaler sees waiting.

    Not all, for there is no taking them back. `ray.cancel` of a task that ends at that moment aborts the process that began it
    (Ray 2.60, "Tried to complete task that was not pending"), and tasks over broken files end at one moment.
    """
    import ray

    return max(2, 2 * int(ray.cluster_resources().get("CPU", 0) / num_cpus))


def cluster_cpus() -> int:
    """CPUs of the cluster; 1 where Ray was not initialised."""
    ray = sys.modules.get("ray")
    return max(1, int(ray.cluster_resources().get("CPU", 1))) if ray is not None and ray.is_initialized() else 1


def import_ahead() -> None:
    """Let one of Ray's processes import what prepares rows, and come to wait for `ray_map` with it. Returns at once.

    A first task begins 0.7 s sooner; the imports run beside whatever the driver does meanwhile, at Ray's lower priority.
    """
    import ray

    @ray.remote(num_cpus=1, max_retries=0)
    def load() -> None:
        for name in ("penstock.ingest.preprocess.fit", "penstock.ingest.materialize.build"):
            importlib.import_module(name)

    load.remote()


@contextlib.contextmanager
def raising_the_original() -> Iterator[None]:
    """Raise what penstock or a file raised in a worker, instead of Ray's wrapping of it; Ray's remains as the cause."""
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
    """As `raising_the_original`; besides, what Ray itself raises becomes an error that says what to do. For the driver.

    In a training worker Ray's own errors stay: Ray Train starts the worker again.

    Raises:
        PreflightError: a process died more often than Ray starts it again.
        ServiceError: Ray lost the work, which another try may mend.
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
            next_step="look at the memory of the nodes and at the code that runs there; the same command goes on with what is "
            "done",
        ) from error
    except RayError as error:
        raise ServiceError(
            f"Ray lost what was under way: {type(error).__name__}: {first_line(error)}",
            next_step="look at the nodes of the cluster; the same command goes on with what is done",
        ) from error
