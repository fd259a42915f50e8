"""Was Cancel pressed in Prefect? A thread asks the server, and turns a yes into the signal that Ctrl-C would send.

Prefect tells only flow processes that its own workers started; a flow run from a terminal would go on to its end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.runtime import flow_run

from penstock.tasks.prefect_away import AWAY

__all__ = ["cancel_becomes_sigterm"]


ASK_EVERY_S = 3.0

WORKER_FIRST_S = 20.0
"""How long a worker has to signal a run it started; it looks every 10 s. A second signal would mean: stop without saving."""


@contextlib.contextmanager
def cancel_becomes_sigterm(stop: threading.Event) -> Iterator[None]:
    """For the block: send this process SIGTERM once its flow run is being cancelled, unless `stop` is set by then."""
    identity = flow_run.get_id()
    if identity is None:
        yield
        return
    done = threading.Event()
    from_worker = "PREFECT__FLOW_RUN_ID" in os.environ
    patience_s = WORKER_FIRST_S if from_worker else 0.0
    arguments = (UUID(identity), stop, done, patience_s)
    thread = threading.Thread(target=_ask_server, args=arguments, name="penstock-cancel-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=ASK_EVERY_S)


def _ask_server(identity: UUID, stop: threading.Event, done: threading.Event, patience_s: float) -> None:
    # One client for all questions: each new one reads every certificate of the machine.
    with get_client(sync_client=True) as client:
        _watch(lambda: _is_cancelled(client, identity), stop, done, patience_s)


def _watch(is_cancelled: Callable[[], bool], stop: threading.Event, done: threading.Event, patience_s: float) -> None:
    while not done.wait(ASK_EVERY_S):
        if stop.is_set():
            return
        if is_cancelled():
            stop.wait(patience_s)
            if not (done.is_set() or stop.is_set()):
                os.kill(os.getpid(), signal.SIGTERM)
            return


def _is_cancelled(client: SyncPrefectClient, identity: UUID) -> bool:
    # A server that is away for a moment says nothing about the run.
    with contextlib.suppress(*AWAY):
        state = client.read_flow_run(identity).state
        return state is not None and (state.is_cancelling() or state.is_cancelled())
    return False
