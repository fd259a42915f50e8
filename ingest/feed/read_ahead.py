"""How is work done ahead of the one who needs it, without outliving him?

One thread runs an iterator and hands its items over through a bounded queue. On request it is started only when the consumer
is seen to do something meanwhile: to one who only asks for the next item a thread brings nothing, and handing over costs both.

Closing or dropping the consuming generator stops the thread, and so does the end of the program: a thread that Python takes
away while it is inside torch aborts the process. An exception in the thread is raised at the consumer, after the items before
it.
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
"""The thread is started when so much was lost without it, and no item in between came for which it would have saved nothing."""

HAND_OVER_S = 0.0001
"""What it costs to hand an item over: 0.09 ms on two cores in use (AMD EPYC, virtual machine)."""

OTHER_CACHE_S = 0.0005
"""What it costs at most that an item lies in another core's cache, which made it: up to an eighth of what making it takes."""


class _End:
    """The thread's last word: finished, or stopped by an error."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead(items: Iterator[T], depth: int, *, once_it_pays: bool = False) -> Generator[T]:
    """Yield `items` while a thread works up to `depth` of them ahead; with depth 0 no thread is used.

    Args:
        once_it_pays: make items in the consumer's thread until one of their own would save time. They must not depend on who
            makes them: what is set for a thread alone (torch's autocast, gradients, default device) differs.
    """
    if depth == 0:
        yield from items
    elif not once_it_pays or (yield from _until_it_pays(items)):
        yield from _by_thread(items, depth)


def _until_it_pays(items: Iterator[T]) -> Generator[T, None, bool]:
    """Yield `items` until a thread is worth its while: whether it is, and they are not at their end."""
    lost, ours = 0.0, True
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
        ours = False
        return True
    finally:
        if ours:
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
    # A dropped generator may be found by the garbage collection of the thread itself.
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
    except BaseException as error:  # handed to the consumer, whatever it is
        ready.put(_End(error))
    finally:
        _close(items)


def _close(items: Iterator[T]) -> None:
    close = getattr(items, "close", None)
    if close is not None:
        close()
