"""When does torch take only algorithms that give the same bits every time? While a worker trains, but for what counts.

The mode is one setting for the whole process, and batches are augmented in a thread of their own: who augments and who leaves
the mode take turns.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

__all__ = ["any_algorithm", "in_deterministic_mode", "make_deterministic"]


P = ParamSpec("P")

T = TypeVar("T")

_TURN = threading.Lock()


def make_deterministic(cpus: float) -> None:
    """Ask every library for the same result every time; the number of threads decides how sums on a CPU are cut."""
    # Read by cuBLAS when it is first used: without it its results may differ from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(max(1, int(cpus)))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def in_deterministic_mode(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, which never runs while `any_algorithm` does."""

    @functools.wraps(function)
    def turn(*args: P.args, **options: P.kwargs) -> T:
        with _TURN:
            return function(*args, **options)

    return turn


@contextmanager
def any_algorithm() -> Iterator[None]:
    """Leave the mode for a while, if it is on. For what comes out the same without it."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with _TURN:
        torch.use_deterministic_algorithms(False)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(True, warn_only=warns)
