"""How is work done ahead of its consumer in a thread that never outlives the consumer?

One thread runs an iterator and passes its items on through a bounded queue. Closing or dropping the consuming generator stops
the thread, and so does the end of the program: a thread that Python kills inside torch aborts the process. An exception in the
thread is raised in the consumer, after the items before it.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Generator, Iterator
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

__all__ = ["ahead"]


T = TypeVar("T")


class _End:
    """Last item of the thread: finished, or stopped by an error."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead(items: Iterator[T], depth: int) -> Generator[T]:
    """Yield `items` while a thread makes up to `depth` of them ahead; with depth 0 no thread is used."""
    if depth == 0:
        yield from items
        return
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
        close = getattr(items, "close", None)
        if close is not None:
            close()
