"""What happens when a signal asks the process to stop? The first one saves and stops; the second one stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from penstock.errors import Interrupted

__all__ = ["StopRequest", "stop_behind", "stopping_on_signals"]


class StopRequest:
    """Whether this process was asked to stop.

    Attributes:
        stop: set by the first signal.
        graceful: true while the work in progress looks at `stop` by itself and saves; then a first signal must not
            interrupt it.
        received: the signals so far, in order.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.graceful = False
        self.received: list[int] = []

    @property
    def signum(self) -> int:
        """The first signal received; SIGTERM if `stop` was set without one."""
        return self.received[0] if self.received else signal.SIGTERM

    def check(self) -> None:
        """Raise Interrupted if a stop was asked for."""
        if self.stop.is_set():
            raise Interrupted(self.signum)


def stop_behind(error: BaseException) -> Interrupted | None:
    """The stop that `error` came of, if any. A signal may arrive inside code that turns every exception into its own."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, Interrupted):
        seen = seen.__cause__ or seen.__context__
    return seen


@contextmanager
def stopping_on_signals(request: StopRequest) -> Iterator[None]:
    """Handle SIGINT and SIGTERM for the duration of the block.

    The first signal sets `request.stop`. If the work does not look at it, or a signal comes twice, Interrupted is raised in
    the main thread. Outside the main thread nothing is installed, since Python delivers no signals there.
    """

    def handle(signum: int, _frame: FrameType | None) -> None:
        request.received.append(signum)
        request.stop.set()
        if not request.graceful or len(request.received) > 1:
            raise Interrupted(request.signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
