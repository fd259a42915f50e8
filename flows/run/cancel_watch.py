"""Stop this process if its flow run is cancelled in Prefect: a thread polls the server, then sends SIGTERM.

Prefect signals only processes that its workers started.
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
"""Timeout for a worker to signal a run it started; it polls every 10 s. A second signal would stop without saving."""


@contextlib.contextmanager
def cancel_becomes_sigterm(stop: threading.Event) -> Iterator[None]:
    """For the block: send this process SIGTERM once its flow run is being cancelled, unless `stop` is set by then."""
    identity = flow_run.get_id()
    if identity is None:
        yield
        return
    done = threading.Event()
    from_worker = "PREFECT__FLOW_RUN_ID" in os.environ
    timeout_s = WORKER_FIRST_S if from_worker else 0.0
    arguments = (UUID(identity), stop, done, timeout_s)
    thread = threading.Thread(target=_ask_server, args=arguments, name="penstock-cancel-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=ASK_EVERY_S)


def _ask_server(identity: UUID, stop: threading.Event, done: threading.Event, timeout_s: float) -> None:
    # One client for all questions: each new one reads every certificate of the machine.
    with get_client(sync_client=True) as client:
        _watch(lambda: _is_cancelled(client, identity), stop, done, timeout_s)


def _watch(is_cancelled: Callable[[], bool], stop: threading.Event, done: threading.Event, timeout_s: float) -> None:
    while not done.wait(ASK_EVERY_S):
        if stop.is_set():
            return
        if is_cancelled():
            stop.wait(timeout_s)
            if not (done.is_set() or stop.is_set()):
                os.kill(os.getpid(), signal.SIGTERM)
            return


def _is_cancelled(client: SyncPrefectClient, identity: UUID) -> bool:
    # A server that is away for a moment does not mean that the run is cancelled.
    with contextlib.suppress(*AWAY):
        state = client.read_flow_run(identity).state
        return state is not None and (state.is_cancelling() or state.is_cancelled())
    return False
