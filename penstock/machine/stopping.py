"""What happens on SIGINT and SIGTERM? The first one saves and stops; the second one stops at once.

So does the loss of the lease, which a thread notices: then this process may save nothing.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

from penstock.errors import Interrupted, LeaseHeldError

__all__ = ["StopRequest", "stop_behind", "stopping_on_signals"]

_LOGGING = logging.getLogger.__code__.co_filename

_IMPORT_LOOKS_S = 0.05
"""Time until a signal that met an import is repeated."""


class StopRequest:
    """Whether this process was asked to stop.

    Attributes:
        stop: set by the first signal.
        graceful: true while the work in progress reads `stop` itself and saves; then a first signal does not interrupt it.
        received: the signals so far, in order.
        lost: why this process may not go on; see `give_up`.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.graceful = False
        self.received: list[int] = []
        self.lost: LeaseHeldError | None = None
        self._interrupt: Callable[[], None] = lambda: None

    @property
    def signum(self) -> int:
        """The first signal received; SIGTERM if `stop` was set without one."""
        return self.received[0] if self.received else signal.SIGTERM

    def give_up(self, error: LeaseHeldError) -> None:
        """End the work without saving: `error` is raised in the main thread at once. From any thread.

        If signals are not handled, the next `check` raises it.
        """
        self.lost = error
        self._interrupt()

    def check(self) -> None:
        """Raise the error of `give_up`, or Interrupted if a stop was requested."""
        if self.lost is not None:
            raise self.lost
        if self.stop.is_set():
            raise Interrupted(self.signum)


def stop_behind(error: BaseException) -> Interrupted | LeaseHeldError | None:
    """Find the stop among the causes of `error`, for some code turns every exception into its own."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, Interrupted | LeaseHeldError):
        seen = seen.__cause__ or seen.__context__
    return seen


@contextmanager
def stopping_on_signals(request: StopRequest) -> Iterator[None]:
    """Handle SIGINT and SIGTERM for the duration of the block.

    The first signal sets `request.stop`. If the work is not graceful, or on a second signal, Interrupted is raised in the main
    thread. Outside the main thread nothing is installed, since Python delivers no signals there.

    During an import the first signal is deferred to its end: an exception within Python's import machinery can leave a module
    locked, and the next import of it then waits for ever. Likewise while logging holds its lock: see `_must_end`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _Handler(request)
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    request._interrupt = handler.interrupt
    try:
        yield
    finally:
        request._interrupt = lambda: None
        handler.end()
        for number, one_before in before.items():
            signal.signal(number, one_before)


def _must_end(code: CodeType) -> bool:
    """Whether the code is of an import, or takes or releases the lock of logging.

    The latter runs at each fork, where Python swallows exceptions: the stop would be lost and the lock kept for ever.
    """
    if code.co_filename.startswith("<frozen importlib"):
        return True
    return code.co_filename == _LOGGING and code.co_name in ("_acquireLock", "_releaseLock")


class _Handler:
    """The signal handler. Runs in the main thread, but for `_repeat`."""

    def __init__(self, request: StopRequest) -> None:
        self._request = request
        self._timer: threading.Timer | None = None
        self._is_repeat = False
        self._ended = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        request = self._request
        if self._is_repeat:
            self._is_repeat = False
            if self._ended:
                return
        elif request.lost is None:
            request.received.append(signum)
            request.stop.set()
        if request.lost is not None:
            if not self._is_deferred(signum, frame):
                raise request.lost
            return
        if len(request.received) == 1 and (request.graceful or self._is_deferred(signum, frame)):
            return
        raise Interrupted(request.signum)

    def interrupt(self) -> None:
        """Make the main thread run the handler. From any thread."""
        if not self._ended:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def end(self) -> None:
        """Stop repeating a deferred signal."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def _is_deferred(self, signum: int, frame: FrameType | None) -> bool:
        """Whether the interrupted code must run to its end; then the signal is repeated."""
        while frame is not None and not _must_end(frame.f_code):
            frame = frame.f_back
        if frame is None:
            return False
        self._timer = threading.Timer(_IMPORT_LOOKS_S, self._repeat, (signum,))
        self._timer.daemon = True
        self._timer.start()
        return True

    def _repeat(self, signum: int) -> None:
        self._is_repeat = True
        signal.pthread_kill(threading.main_thread().ident or 0, signum)
