"""How is one function run over many items in a few processes on a Ray cluster, each of which makes it once?"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from penstock.ingest.ray_tasks import raising_ours
from penstock.machine.prints import keeping_prints, print_again, printed_before
from penstock.redact import hiding_secrets

__all__ = ["ray_pool"]

Item = TypeVar("Item")

Result = TypeVar("Result")


def ray_pool(
    make: Callable[[], Callable[[Item], Result]], items: Sequence[Item], *, processes: int, num_gpus: float = 0
) -> Iterator[Result]:
    """Run the function that `make()` returns on every item, in processes that call `make` once (it may load a model).

    Results come in the order of completion. A process that dies is restarted with its item, three times. An idle process ends,
    so that its CPU is free for a restarted one. After a failure no more items are submitted, and the running ones are awaited.
    The output of an item is printed by this process once the item is done.

    Args:
        processes: most processes; each takes one CPU.
        num_gpus: GPUs of each process. With 0 it sees no GPU (Ray would show it all GPUs of its node).

    Raises:
        Exception: the error of a process, as it was raised; errors of Ray itself as in `raising_ours`.
    """
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    worker = _worker().options(num_cpus=1, num_gpus=num_gpus, max_restarts=3, max_task_retries=3, scheduling_strategy="SPREAD")
    waiting, running = iter(items), dict[Any, Any]()
    with raising_ours():
        shared = ray.put(make)  # not an argument of the constructor, which Ray could lose before a restart
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
