"""How do metrics reach a tracking server that may be down, while training goes on?

Two lanes and one daemon thread. Points are sent in the order they were made and are never dropped while the process lives,
so the server always holds a prefix of the history. Everything else (tags, artifacts, checkpoints) is an `Operation`: plain
data, made so that doing it twice does no harm, and kept in an *outbox* file while the server is away. An operation waits for
the points made before it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from pydantic import ConfigDict, ValidationError

from penstock.config import Section
from penstock.messages import counted
from penstock.redact import first_line
from penstock.storage import Storage
from penstock.training.events import Point

__all__ = ["Operation", "Outbox", "Sender", "Transport", "Trouble"]


_log = logging.getLogger("penstock.tracking")

_OUTBOX = "outbox.json"

_MAX_VALUES = 900
"""Values per request: MLflow takes at most 1000 metrics at once."""

_KEPT_POINTS = 10_000
"""Oldest unsent points kept in the outbox while the process lives; the journal holds the others."""

_POINTS_EVERY_S = 1.0
"""Between two requests of points, unless there are enough for a whole one or somebody waits: what a request costs beside its
points is as much as sixty of them."""

_HOPELESS = 3
"""Refusals in a row after which the rest of a refused request is not tried point by point."""


class Operation(Section):
    """Something to do on the server, as JSON-able data. Doing it twice must equal doing it once."""

    kind: str
    args: dict[str, Any]
    any_order: bool = False
    """Whether a later operation may pass it. False for tags: an old value must not overwrite a newer one."""


class Outbox(Section):
    """What an earlier process could not deliver."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # a loss of NaN is news too, and JSON's null is none

    version: int = 1
    operations: tuple[Operation, ...] = ()
    points: tuple[tuple[int, int, dict[str, float]], ...] = ()

    @classmethod
    def load(cls, storage: Storage | None) -> Outbox:
        """Read the outbox; an empty one if there is none or it cannot be read (a warning says so)."""
        if storage is None or not storage.exists(_OUTBOX):
            return cls()
        try:
            return cls.model_validate_json(storage.read_bytes(_OUTBOX))
        except ValidationError as error:
            _log.warning("ignoring %s: %s", storage.uri(_OUTBOX), error)
            return cls()

    def save(self, storage: Storage) -> None:
        """Replace the file, or delete it when there is nothing to keep."""
        if self.operations or self.points:
            storage.write_bytes(_OUTBOX, self.model_dump_json().encode())
        else:
            storage.delete(_OUTBOX)


class Trouble(Enum):
    """What an exception from the server means."""

    PASSING = "passing"
    """Down, slow or overloaded: the same request may succeed later."""
    FINAL = "final"
    """Understood and refused: the same request will never succeed."""


class Transport(Protocol):
    """The server's side; only the sender's thread calls it."""

    def send_points(self, points: list[Point]) -> None:
        """Log the points; logging the same points again must change nothing."""

    def perform(self, operation: Operation) -> None:
        """Do one operation."""

    def judge(self, error: Exception) -> Trouble:
        """Classify what the two above raised. Without this method, all is tried again."""
        return Trouble.PASSING


class _Queued(NamedTuple):
    operation: Operation
    after: int
    """Number of points that must have left before this operation may."""


@dataclass
class _Patience:
    """When a lane may try again."""

    failures: int = 0
    due: float = 0.0


class Sender:
    """The queue in front of a server. All methods but `drain` return at once, whatever the server does."""

    def __init__(
        self,
        transport: Transport,
        outbox: Storage | None = None,
        *,
        delays_s: tuple[float, float] = (0.5, 10.0),
        points_every_s: float = _POINTS_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the lanes; `delays_s` is the first and the longest pause after a failure."""
        self._transport = transport
        self._outbox = outbox
        self._first_delay_s, self._longest_delay_s = delays_s
        self._clock = clock
        self._changed = threading.Condition()
        self._points: deque[Point] = deque()
        self._operations: deque[_Queued] = deque()
        self._points_in = 0
        self._points_out = 0
        self._points_every_s = points_every_s
        self._gathering_until_s = 0.0
        self._waited_for = 0
        """Callers of `drain`."""
        self._points_patience = _Patience()
        self._operations_patience = _Patience()
        self._dirty = False
        self._saved = False
        self._stopping = False
        self._busy = False
        self._thread = threading.Thread(target=self._run, name="penstock-tracking", daemon=True)

    def start(self) -> None:
        """Start sending."""
        self._thread.start()

    def recover(self, left: Outbox) -> list[Point]:
        """Queue the operations an earlier process left unsent. Returns its points: the caller knows which are still news.

        Call it before `start`; the outbox file goes away once all is delivered.
        """
        with self._changed:
            self._operations.extend(_Queued(operation, self._points_in) for operation in left.operations)
            self._saved = self._dirty = bool(left.operations or left.points)
        return [Point(*point) for point in left.points]

    def put_points(self, points: list[Point]) -> None:
        """Queue points, in order."""
        with self._changed:
            self._points.extend(points)
            self._points_in += len(points)
            self._changed.notify_all()

    def put(self, operation: Operation) -> None:
        """Queue an operation behind the points queued so far."""
        with self._changed:
            self._operations.append(_Queued(operation, self._points_in))
            self._dirty = True
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Points and operations not yet on the server."""
        with self._changed:
            return len(self._points) + len(self._operations)

    @property
    def failing(self) -> bool:
        """Whether the last request failed."""
        with self._changed:
            return bool(self._points_patience.failures or self._operations_patience.failures)

    def drain(self, timeout_s: float) -> int:
        """Wait until all is sent or `timeout_s` has passed. Returns how many points and operations are left."""
        deadline = self._clock() + timeout_s
        with self._changed:
            self._points_patience.due = self._operations_patience.due = 0.0
            self._waited_for += 1
            self._changed.notify_all()
            while self._points or self._operations or self._busy:
                left = deadline - self._clock()
                if left <= 0:
                    break
                self._changed.wait(left)
            self._waited_for -= 1
            return len(self._points) + len(self._operations)

    def stop(self, join_s: float = 15.0) -> None:
        """End the thread; what is unsent goes to the outbox."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(join_s)
        self._save(everything=True)

    def abandon(self, join_s: float = 15.0) -> None:
        """End the thread, and leave the outbox as it is: it is another process's."""
        self._outbox = None
        self.stop(join_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                chunk, queued = self._next()
                while not self._stopping and not chunk and queued is None:
                    self._changed.wait(self._pause())
                    chunk, queued = self._next()
                if self._stopping:
                    return
                self._busy = True
            try:
                if queued is None:
                    self._transport.send_points(chunk)
                else:
                    self._transport.perform(queued.operation)
            except Exception as error:  # `Transport.judge` says what it means; this thread must live on
                self._failed(error, chunk, queued)
            else:
                self._succeeded(chunk)
            if self._dirty and (self.failing or self._saved):
                self._save(everything=False)

    def _next(self) -> tuple[list[Point], _Queued | None]:
        """What to send now: an operation whose turn has come, else points that need not wait for more. Holds the lock."""
        now = self._clock()
        first = self._operations[0] if self._operations else None
        if first is not None and first.after <= self._points_out and now >= self._operations_patience.due:
            return [], first
        chunk: list[Point] = []
        values = 0
        for point in self._points if now >= self._points_patience.due else ():
            values += len(point.values)
            if chunk and values > _MAX_VALUES:
                return chunk, None
            chunk.append(point)
        return chunk if now >= self._gathered_s() else [], None

    def _gathered_s(self) -> float:
        """When points leave that do not fill a request. Holds the lock."""
        return 0.0 if self._waited_for or self._operations else self._gathering_until_s

    def _pause(self) -> float | None:
        """Seconds until a retry is due; None to wait for something new. Holds the lock."""
        dues = [max(self._points_patience.due, self._gathered_s())] if self._points else []
        if self._operations and self._operations[0].after <= self._points_out:
            dues.append(self._operations_patience.due)
        return max(0.0, min(dues) - self._clock()) if dues else None

    def _succeeded(self, chunk: list[Point]) -> None:
        with self._changed:
            mine = self._points_patience if chunk else self._operations_patience
            if mine.failures:
                _log.warning("the tracking server answers again; %d points are on their way", len(self._points))
                self._points_patience.due = self._operations_patience.due = 0.0
            mine.failures, mine.due = 0, 0.0
            if chunk:
                self._gathering_until_s = self._clock() + self._points_every_s
            self._pop(chunk)

    def _pop(self, chunk: list[Point]) -> None:
        """Forget what was sent (or refused for good). Holds the lock."""
        if chunk:
            for _ in chunk:
                self._points.popleft()
            self._points_out += len(chunk)
        else:
            self._operations.popleft()
            self._dirty = True
        self._busy = False
        self._changed.notify_all()

    def _failed(self, error: Exception, chunk: list[Point], queued: _Queued | None) -> None:
        if self._transport.judge(error) is Trouble.FINAL:
            self._refused(error, chunk, queued)
            return
        with self._changed:
            mine = self._points_patience if queued is None else self._operations_patience
            if not self._points_patience.failures and not self._operations_patience.failures:
                _log.warning("tracking is behind, training goes on; retrying: %s", first_line(error))
                self._dirty = True
            mine.due = self._clock() + min(self._longest_delay_s, self._first_delay_s * 2 ** min(mine.failures, 10))
            mine.failures += 1
            if queued is not None and queued.operation.any_order:
                self._operations.rotate(-1)
            self._busy = False
            self._changed.notify_all()

    def _refused(self, error: Exception, chunk: list[Point], queued: _Queued | None) -> None:
        """Drop what the server will never take, and say so. One bad point must not take its neighbours along."""
        lost, in_a_row = len(chunk), 0
        for point in chunk if len(chunk) > 1 else ():
            try:
                self._transport.send_points([point])
            except Exception as second:  # judged in the next line
                if self._transport.judge(second) is Trouble.PASSING:
                    self._failed(second, [], None)  # the whole chunk goes again later: what was sent already changes nothing
                    return
                in_a_row += 1
                if in_a_row == _HOPELESS:
                    break
            else:
                lost, in_a_row = lost - 1, 0
        what = queued.operation.kind if queued is not None else f"{counted(lost, 'point')} from step {chunk[0].step} on"
        _log.warning("the tracking server refuses %s: %s", what, first_line(error))
        with self._changed:
            self._pop(chunk)

    def _save(self, *, everything: bool) -> None:
        """Keep what is unsent; only at the end all points, since the journal holds those of training."""
        if self._outbox is None:
            return
        with self._changed:
            operations = tuple(queued.operation for queued in self._operations)
            kept = self._points if everything else itertools.islice(self._points, _KEPT_POINTS)
            points = tuple((p.t_ms, p.step, dict(p.values)) for p in kept)
            self._dirty = False
        try:
            Outbox(operations=operations, points=points).save(self._outbox)
            self._saved = bool(operations or points)
        except Exception as error:  # a storage that fails must not end the thread that sends
            _log.warning("cannot keep %d unsent tracking operations: %s", len(operations), first_line(error))
