"""How is one function run over many items, on a Ray cluster or in this process?

Both ways have one signature, so that what uses them does not know which it is: results come in the order they are done.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from penstock.errors import PenstockError

__all__ = ["ParallelMap", "local_map", "quiet_ray_data", "raising_the_original", "ray_map"]

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
    """Run `fn` with Ray Data, one task per item. Ray must be initialised, and its workers able to import these packages.

    Raises:
        Exception: what `fn` raised, as it was raised; errors of Ray itself as they are.
    """
    if not items:
        return
    import ray

    held = list(items)

    def call(row: dict[str, Any]) -> dict[str, Any]:
        # Bytes, so that Ray Data does not look for columns in the result.
        return {"result": ray.cloudpickle.dumps(fn(held[row["item"]]))}

    with quiet_ray_data():
        rows = ray.data.from_items([{"item": i} for i in range(len(held))], override_num_blocks=len(held))
        results = rows.map(call, num_cpus=num_cpus)
    with raising_the_original():
        for row in results.iter_rows():
            # Made by this program a moment ago and carried between its own processes: nothing stored is unpickled.
            yield ray.cloudpickle.loads(row["result"])


@contextlib.contextmanager
def quiet_ray_data(*, preserve_order: bool = False) -> Iterator[None]:
    """Make Ray Data datasets that run without progress bars; those made outside keep their own settings.

    Args:
        preserve_order: keep blocks in order, so that a sum over them rounds the same way every time.
    """
    import ray.data

    # Ray Data reports every plan it runs at INFO, and every task that raises at ERROR, besides raising it.
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the copy reads options that Ray itself has deprecated
        context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.raise_original_map_exception = True
    context.execution_options.preserve_order = preserve_order
    if preserve_order:
        # The hash shuffle merges partial aggregates as they arrive; this one merges them in the order of the blocks.
        context.shuffle_strategy = ray.data.context.ShuffleStrategy.SORT_SHUFFLE_PULL_BASED
    with ray.data.DataContext.current(context):
        yield


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
