"""How do metrics reach a tracking server that may be down, while training goes on?

One queue and one daemon thread. Points are sent in their order. A failure that may pass drops none; what the server refuses is
dropped, with one warning for points. Everything else (tags, artifacts) is an `Operation`: plain data, made so that
doing it twice does no harm. What is not sent yet is kept in an *outbox* file while the server is away.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, ValidationError

from penstock.config import Section
from penstock.redact import first_line
from penstock.storage import Storage
from penstock.training.events import Point

__all__ = ["OpenRun", "Operation", "Outbox", "Sender"]

_log = logging.getLogger("penstock.tracking")

_OUTBOX = "outbox.json"

_MAX_VALUES = 900
"""Values per request: MLflow takes at most 1000 metrics at once."""

_KEPT_POINTS = 10_000
"""Oldest unsent points kept in the outbox while the process lives; the journal holds the others."""

_POINTS_EVERY_S = 1.0
"""Between two requests of points, unless they fill one or something waits for them: a request costs as much as sixty points."""

_QUIET_S = 60.0
"""Between two warnings of a failure: one artifact may fail again and again between requests that succeed."""


class Operation(Section):
    """Something to do on the server, as JSON-able data. Doing it twice must equal doing it once."""

    kind: str
    args: dict[str, Any]
    any_order: bool = False
    """Whether a later operation may pass it. False for tags: an old value must not overwrite a newer one."""


class Outbox(Section):
    """The points and operations that an earlier process could not deliver."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # JSON's null would lose a loss of NaN

    version: int = 1
    operations: tuple[Operation, ...] = ()
    points: tuple[tuple[int, int, dict[str, float]], ...] = ()

    @classmethod
    def load(cls, storage: Storage | None) -> Outbox:
        """Read the outbox; an empty one if there is none, or, with a warning, if it cannot be read."""
        if storage is None:
            return cls()
        try:
            return cls.model_validate_json(storage.read_bytes(_OUTBOX))
        except FileNotFoundError:
            return cls()
        except ValidationError as error:
            _log.warning("ignoring %s: %s", storage.uri(_OUTBOX), error)
            storage.delete(_OUTBOX)
            return cls()

    def save(self, storage: Storage) -> None:
        """Replace the file, or delete it if there is nothing to keep."""
        if self.operations or self.points:
            storage.write_bytes(_OUTBOX, self.model_dump_json().encode())
        else:
            storage.delete(_OUTBOX)


class OpenRun(ABC):
    """A run at a service. Only the sender's thread calls its methods.

    Attributes:
        last_step: highest step per metric that the service has.
        status: RUNNING, or what `Tracker.close` set.
    """

    run_id: str
    last_step: Mapping[str, int]
    status: str

    @abstractmethod
    def send_points(self, points: list[Point]) -> None:
        """Log the points; logging the same points again must change nothing."""

    @abstractmethod
    def perform(self, operation: Operation) -> None:
        """Do one operation."""

    def is_final(self, error: Exception) -> bool:
        """Whether an exception of the two above is a refusal, which no second try mends. Without this method none is."""
        return False


class Sender:
    """The queue in front of a server. All methods but `drain`, `stop` and `abandon` return at once, server or not."""

    def __init__(
        self,
        run: OpenRun,
        outbox: Storage | None = None,
        *,
        delays_s: tuple[float, float] = (0.5, 10.0),
        points_every_s: float = _POINTS_EVERY_S,
    ) -> None:
        """Prepare the queue; `delays_s` is the first and the longest pause after a failure."""
        self._at = run
        self._outbox = outbox
        self._first_delay_s, self._longest_delay_s = delays_s
        self._points_every_s = points_every_s
        self._changed = threading.Condition()
        self._queue: deque[Point | Operation] = deque()
        self._pause_until_s = 0.0
        """Until then a failed request is not tried again, and points gather."""
        self._draining = 0
        """Callers of `drain`."""
        self._failures = 0
        """Failed requests in a row."""
        self._behind = False
        """Whether the last warning is that tracking is behind."""
        self._quiet_until_s = 0.0
        self._warned = False
        """Whether a refused point was reported."""
        self._unsaved = False
        """Whether the outbox lacks an operation, or holds one that was sent."""
        self.keeps_outbox = False
        """Whether there is an outbox, or may be one."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="penstock-tracking", daemon=True)

    def start(self) -> None:
        """Start sending."""
        self._thread.start()

    def recover(self, left: Outbox) -> list[Point]:
        """Queue what an earlier process left unsent, and return its points: the caller knows which are still new.

        An unsent status is left to the caller, too: it comes last. Call it before `start`; the outbox file is deleted once all
        is delivered.
        """
        with self._changed:
            self._queue.extend(each for each in left.operations if each.kind != "status")
            self.keeps_outbox = self._unsaved = bool(left.operations or left.points)
        return [Point(*point) for point in left.points]

    def put_points(self, points: list[Point]) -> None:
        """Queue points, in order."""
        with self._changed:
            self._queue.extend(points)
            self._changed.notify_all()

    def put(self, operation: Operation) -> None:
        """Queue an operation behind everything queued so far."""
        with self._changed:
            self._queue.append(operation)
            self._unsaved = True
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> int:
        """Wait until all is sent or `timeout_s` has passed. Returns how many points and operations are left."""
        with self._changed:
            self._draining += 1
            self._pause_until_s = 0.0
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._queue, timeout_s)
            self._draining -= 1
            return len(self._queue)

    def stop(self, join_s: float = 15.0) -> None:
        """End the thread; what is unsent goes to the outbox."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(join_s)
        self._save(everything=True)

    def abandon(self, join_s: float = 15.0) -> None:
        """End the thread and leave the outbox as it is: it belongs to another process."""
        self._outbox = None
        self.stop(join_s)

    def _run(self) -> None:
        while chunk := self._next():
            try:
                self._deliver(chunk)
            except Exception as error:  # it will pass, see `_deliver`; this thread must live on
                self._failed(error, chunk[0])
            else:
                self._sent(chunk)
            if self._unsaved and (self._failures or self.keeps_outbox):
                self._save(everything=False)

    def _next(self) -> list[Point] | list[Operation]:
        """Wait for the next request: one operation, or points. Empty at the end."""
        with self._changed:
            while not self._stopping:
                chunk, urgent = self._first()
                left_s = self._pause_until_s - time.monotonic()
                if chunk and (left_s <= 0 or (urgent and not self._failures)):
                    return chunk
                self._changed.wait(left_s if chunk else None)
            return []

    def _first(self) -> tuple[list[Point] | list[Operation], bool]:
        """The front of the queue, as one request, and whether it need not wait for further points. Holds the lock."""
        points: list[Point] = []
        values = 0
        for item in self._queue:
            if isinstance(item, Operation):
                return points or [item], True
            values += len(item.values)
            if points and values > _MAX_VALUES:
                return points, True
            points.append(item)
        return points, self._draining > 0

    def _deliver(self, chunk: list[Point] | list[Operation]) -> None:
        """Send one request. A refusal drops an operation or a point: the server will never take it. Many points are halved.

        Raises:
            Exception: the same request may succeed later.
        """
        first = chunk[0]
        try:
            if isinstance(first, Operation):
                self._at.perform(first)
            else:
                self._at.send_points([item for item in chunk if isinstance(item, Point)])
        except Exception as error:
            if not self._at.is_final(error):
                raise
            if isinstance(first, Operation):
                _log.warning("the tracking server refuses %s: %s", first.kind, first_line(error))
            elif len(chunk) > 1:
                for half in (chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]):
                    self._deliver(half)
            elif not self._warned:
                self._warned = True
                text = "the tracking server refuses the point of step %d, and maybe later ones: %s"
                _log.warning(text, first.step, first_line(error))

    def _sent(self, chunk: list[Point] | list[Operation]) -> None:
        with self._changed:
            if self._behind:
                _log.warning("the tracking server answers again; %d records are on their way", len(self._queue))
            self._failures, self._behind = 0, False
            self._pause_until_s = time.monotonic() + self._points_every_s if isinstance(chunk[0], Point) else 0.0
            self._unsaved |= isinstance(chunk[0], Operation)
            for _ in chunk:
                self._queue.popleft()
            self._changed.notify_all()

    def _failed(self, error: Exception, first: Point | Operation) -> None:
        with self._changed:
            if not self._failures:
                self._unsaved = True
            if not self._behind and time.monotonic() >= self._quiet_until_s:
                _log.warning("tracking is behind, training goes on; retrying: %s", first_line(error))
                self._behind, self._quiet_until_s = True, time.monotonic() + _QUIET_S
            delay_s = min(self._longest_delay_s, self._first_delay_s * 2 ** min(self._failures, 10))
            self._pause_until_s = time.monotonic() + delay_s
            self._failures += 1
            if isinstance(first, Operation) and first.any_order:  # the others may succeed
                self._queue.rotate(-1)

    def _save(self, *, everything: bool) -> None:
        """Keep what is unsent; all points only at the end, since the journal holds those of training."""
        if self._outbox is None:
            return
        with self._changed:
            operations = tuple(item for item in self._queue if isinstance(item, Operation))
            points = ((item.t_ms, item.step, dict(item.values)) for item in self._queue if isinstance(item, Point))
            kept = tuple(itertools.islice(points, None if everything else _KEPT_POINTS))
            self._unsaved = False
        self.keeps_outbox |= bool(operations or kept)  # also where it is written and the answer is lost
        try:
            if self.keeps_outbox:
                Outbox(operations=operations, points=kept).save(self._outbox)
            self.keeps_outbox = bool(operations or kept)
        except Exception as error:  # a storage that fails must not end the thread that sends
            _log.warning("cannot keep %d unsent tracking operations: %s", len(operations), first_line(error))
