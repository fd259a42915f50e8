"""How is work done ahead of its consumer in a thread that never outlives the consumer?

One thread runs an iterator and passes its items on through a bounded queue. With `once_it_pays` it is started only if the
consumer works between items: for a consumer that only reads, passing items between threads costs more than it saves. Closing or
dropping the consuming generator stops the thread, and so does the end of the program: a thread that Python kills inside torch
aborts the process. An exception in the thread is raised in the consumer, after the items before it.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Generator, Iterator
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

__all__ = ["ahead"]

T = TypeVar("T")

LOST_S = 0.01
"""Seconds lost without the thread after which it is started, in a row of items that would each have saved time."""

HAND_OVER_S = 0.0001
"""Time to pass an item between threads: 0.09 ms on two cores in use (AMD EPYC, virtual machine)."""

OTHER_CACHE_S = 0.0005
"""Most time lost because an item is in another core's cache: up to an eighth of the time to make it."""


class _End:
    """Last item of the thread: finished, or stopped by an error."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead(items: Iterator[T], depth: int, *, once_it_pays: bool = False) -> Generator[T]:
    """Yield `items` while a thread makes up to `depth` of them ahead; with depth 0 no thread is used.

    Args:
        once_it_pays: make items in the consumer's thread until a thread would save time. Items must not depend on settings of
            the thread that makes them (torch's autocast, gradients, default device).
    """
    if depth == 0:
        yield from items
    elif not once_it_pays or (yield from _until_it_pays(items)):
        yield from _by_thread(items, depth)


def _until_it_pays(items: Iterator[T]) -> Generator[T, None, bool]:
    """Yield `items` until a thread would save time. Returns False at their end."""
    lost, is_ours = 0.0, True
    try:
        while lost < LOST_S:
            began = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return False
            made = time.perf_counter()
            yield item
            del item
            took, away = made - began, time.perf_counter() - made
            saved = min(took, away) - min(took / 8, OTHER_CACHE_S) - HAND_OVER_S
            lost = lost + saved if saved > 0 else 0.0
        is_ours = False
        return True
    finally:
        if is_ours:
            _close(items)


def _by_thread(items: Iterator[T], depth: int) -> Generator[T]:
    ready: SimpleQueue[T | _End] = SimpleQueue()
    free = threading.Semaphore(depth)
    stop = threading.Event()
    thread = threading.Thread(target=_run, args=(items, ready, free, stop), name="penstock-feed", daemon=True)
    finish = partial(_finish, thread, free, stop)
    thread.start()
    atexit.register(finish)
    try:
        while not isinstance(item := ready.get(), _End):
            free.release()
            yield item
        if item.error is not None:
            raise item.error
    finally:
        atexit.unregister(finish)
        finish()


def _finish(thread: threading.Thread, free: threading.Semaphore, stop: threading.Event) -> None:
    stop.set()
    free.release()
    # The garbage collection of the thread itself may find a dropped generator.
    if thread is not threading.current_thread():
        thread.join()


def _run(items: Iterator[T], ready: SimpleQueue[T | _End], free: threading.Semaphore, stop: threading.Event) -> None:
    try:
        while True:
            free.acquire()
            if stop.is_set():
                return
            ready.put(next(items))
    except StopIteration:
        ready.put(_End(None))
    except BaseException as error:  # the consumer raises it, whatever it is
        ready.put(_End(error))
    finally:
        _close(items)


def _close(items: Iterator[T]) -> None:
    close = getattr(items, "close", None)
    if close is not None:
        close()
