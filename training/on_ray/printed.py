"""How does what user code prints, warns and logs on a training worker reach the person who started the run?"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.machine.prints import KeptLines, copying_prints
from penstock.training.events import Printed
from penstock.training.loop.event_sender import PUT_INTERVAL_S, MailboxClient

__all__ = ["sending_prints"]


@contextmanager
def sending_prints(client: MailboxClient, rank: int) -> Iterator[None]:
    """Send the lines that are printed in the block, in any thread of this process, to the driver as well.

    Args:
        client: of this alone, for it is called from a thread.
    """
    lines = KeptLines()
    ended = threading.Event()

    def send() -> None:
        if taken := lines.take():
            client.put([Printed(rank=rank, lines=tuple(taken))])

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
