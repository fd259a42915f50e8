"""How does what user code prints on a training worker reach the person who started the run?"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

from penstock.redact import redact_text
from penstock.training.events import Printed
from penstock.training.loop.event_sender import PUT_INTERVAL_S, MailboxClient

__all__ = ["sending_prints"]

MAX_LINES = 100
"""Of one delivery; what a loop prints beyond that is counted, not shown."""


@contextmanager
def sending_prints(client: MailboxClient, rank: int) -> Iterator[None]:
    """Send the lines that are printed in the block, in any thread of this process, to the driver as well.

    Args:
        client: of this alone, for it is called from a thread.
    """
    lines = _Lines(sys.stdout)
    ended = threading.Event()

    def send() -> None:
        taken, more = lines.take()
        if more:
            taken.append(f"... and {more:,} more lines")
        if taken:
            client.put([Printed(rank=rank, lines=tuple(taken))])

    def send_until_ended() -> None:
        while not ended.wait(PUT_INTERVAL_S):
            send()

    thread = threading.Thread(target=send_until_ended, name="penstock-prints", daemon=True)
    thread.start()
    try:
        with redirect_stdout(lines):
            yield
    finally:
        ended.set()
        thread.join()
        lines.write("\n")
        send()


class _Lines(io.TextIOBase):
    """A stdout that keeps whole lines, besides writing them where they went before."""

    def __init__(self, before: TextIO) -> None:
        self._before = before
        self._lock = threading.Lock()
        self._begun = ""
        self._lines: list[str] = []
        self._more = 0

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """Take text; a line counts when its end is there."""
        self._before.write(text)
        with self._lock:
            *whole, self._begun = (self._begun + text).split("\n")
            whole = [line.rstrip() for line in whole if line.strip()]
            room = max(0, MAX_LINES - len(self._lines))
            self._lines += [redact_text(line) for line in whole[:room]]
            self._more += len(whole[room:])
        return len(text)

    def flush(self) -> None:
        """Flush what is below."""
        self._before.flush()

    def take(self) -> tuple[list[str], int]:
        """The lines since the last call, and how many there were besides."""
        with self._lock:
            lines, more, self._lines, self._more = self._lines, self._more, [], 0
        return lines, more
