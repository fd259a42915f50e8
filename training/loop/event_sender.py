"""How do events reach the driver without a step that waits for them?

Those of rank 0, and of every rank the lines that user code prints and the bytes of fetched shards.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from penstock.ingest.phases import fetched_so_far
from penstock.machine.prints import KeptLines, copying_prints
from penstock.messages import counted, describe_error
from penstock.training.events import Event, Printed, ShardsFetched, TrainProgress, Warned

__all__ = ["EventSender", "MailboxClient", "sending_prints_and_fetches"]

PUT_INTERVAL_S = 0.5
"""Time between two deliveries of rank 0, each of which returns whether to stop."""

FETCHES_INTERVAL_S = 10.0
"""Least time between two deliveries of a rank's fetched bytes: a large cluster has many ranks."""


class MailboxClient(Protocol):
    """Delivers the events of a rank to the driver; tests use a list."""

    def put(self, events: list[Event]) -> bool:
        """Deliver events; True when training should stop."""


class EventSender:
    """Collects rank 0's events and delivers them from a background thread, so that no step waits for the network.

    Args:
        client: reaches the driver.
        interval_s: time between two deliveries.
    """

    def __init__(self, client: MailboxClient, interval_s: float = PUT_INTERVAL_S) -> None:
        self.stop_requested = threading.Event()
        self._client = client
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._deliver_until_closed, name="penstock-events", daemon=True)
        self._thread.start()

    def post(self, event: Event) -> None:
        """Queue an event; returns at once."""
        with self._lock:
            if isinstance(event, TrainProgress):  # only the latest is of interest
                self._events = [waiting for waiting in self._events if not isinstance(waiting, TrainProgress)]
            self._events.append(event)

    def close(self) -> None:
        """Deliver the remaining events and end the thread."""
        self._closing.set()
        self._thread.join()

    def _deliver_until_closed(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(self._interval_s)
            self._deliver()

    def _deliver(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        try:
            if self._client.put(events):
                self.stop_requested.set()
        except Exception as error:  # of any class: without this thread no stop would ever arrive
            kept: list[Event] = [event for event in events if isinstance(event, Warned)]
            if lost := len(events) - len(kept):
                text = f"{counted(lost, 'event')} of training could not be delivered to the driver"
                kept.append(Warned(message=f"{text}: {describe_error(error)}"))
            with self._lock:
                self._events[:0] = kept


@contextmanager
def sending_prints_and_fetches(client: MailboxClient, rank: int) -> Iterator[None]:
    """Send the lines that are printed in the block, in any thread of this process, to the driver as well; and what is fetched.

    Args:
        client: not used elsewhere, for a thread calls it.
    """
    lines = KeptLines()
    ended = threading.Event()
    before = sent = fetched_so_far()
    sent_s = -FETCHES_INTERVAL_S

    def send() -> None:
        nonlocal sent, sent_s
        events: list[Event] = [Printed(rank=rank, lines=tuple(taken))] if (taken := lines.take()) else []
        now, now_s = fetched_so_far(), time.monotonic()
        if now != sent and (ended.is_set() or now_s > sent_s + FETCHES_INTERVAL_S):
            size, wait_s = now.bytes - before.bytes, now.wait_s - before.wait_s
            events.append(ShardsFetched(rank=rank, host=socket.gethostname(), pid=os.getpid(), bytes=size, wait_s=wait_s))
            sent, sent_s = now, now_s
        if events:
            client.put(events)

    def send_until_ended() -> None:
        while not ended.wait(PUT_INTERVAL_S):
            send()

    thread = threading.Thread(target=send_until_ended, name="penstock-prints", daemon=True)
    thread.start()
    try:
        with copying_prints(lines.add):
            yield
    finally:
        ended.set()
        thread.join()
        send()
