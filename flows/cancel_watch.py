"""Did somebody press Cancel in Prefect? A thread asks the server, and turns a yes into the signal that Ctrl-C would send.

Prefect tells only flow processes that its own workers started; a flow run from a terminal would go on to its end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run

__all__ = ["cancel_becomes_sigterm"]

ASK_EVERY_S = 3.0


@contextlib.contextmanager
def cancel_becomes_sigterm() -> Iterator[None]:
    """Send this process SIGTERM once its flow run is being cancelled, for the duration of the block."""
    identity = flow_run.get_id()
    if identity is None:
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(UUID(identity), done), name="penstock-cancel-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=ASK_EVERY_S)


def _watch(identity: UUID, done: threading.Event) -> None:
    while not done.wait(ASK_EVERY_S):
        # A server that is away for a moment says nothing about the run.
        with contextlib.suppress(PrefectException, OSError), get_client(sync_client=True) as client:
            state = client.read_flow_run(identity).state
            if state is not None and (state.is_cancelling() or state.is_cancelled()) and not done.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
                return
