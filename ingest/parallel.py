"""How is one function run over many items, on a Ray cluster or in this process?

Both ways have one signature, so that what uses them does not know which it is: results come in the order they are done.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from penstock.errors import PenstockError

__all__ = ["ParallelMap", "import_ahead", "local_map", "quiet_ray_data", "raising_the_original", "ray_map"]

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
    worker dies is run again.

    Raises:
        Exception: what `fn` raised, as it was raised; errors of Ray itself as they are.
    """
    import ray

    @ray.remote(num_cpus=num_cpus, scheduling_strategy="SPREAD")
    def call(item: Item) -> Result:
        return fn(item)

    waiting = [call.remote(item) for item in items]  # type: ignore[arg-type]
    try:
        with raising_the_original():
            while waiting:
                done, waiting = ray.wait(waiting)
                yield ray.get(done[0])
    finally:  # after an error, or when nobody wants the rest
        for ref in waiting:
            ray.cancel(ref)


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
def quiet_ray_data(*, preserve_order: bool = False) -> Iterator[None]:
    """Make Ray Data datasets that run without progress bars; those made outside keep their own settings.

    Args:
        preserve_order: keep blocks in order.
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
