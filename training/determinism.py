"""Torch's deterministic mode: on while a worker trains, off while metrics count.

The mode is a setting of the whole process, and batches are augmented in another thread: a lock keeps the two apart.
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

_LOCK = threading.Lock()


def make_deterministic(cpus: float) -> None:
    """Set deterministic mode and the number of threads, which decides the order of sums on a CPU."""
    # For cuBLAS, before its first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(max(1, int(cpus)))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def in_deterministic_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap `function` so that it never runs during `any_algorithm`."""

    @functools.wraps(function)
    def locked(*args: P.args, **options: P.kwargs) -> T:
        with _LOCK:
            return function(*args, **options)

    return locked


@contextmanager
def any_algorithm() -> Iterator[None]:
    """Leave the mode for the block, for operations whose results are the same without it."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with _LOCK:
        torch.use_deterministic_algorithms(False)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(True, warn_only=warns)
