"""Give Prefect's flow run of an attempt a readable name and its final state."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import Abort, PrefectException
from prefect.runtime import flow_run

from penstock.errors import Interrupted, ServiceError
from penstock.redact import first_line
from penstock.tasks.prefect_away import AWAY
from penstock.tasks.records.ledger import Attempt, Status

__all__ = ["NOTABLE", "FlowEndedOffline", "flow_result", "name_at_begin", "name_flow_run", "remember_end", "report_end"]

NOTABLE = "Notable"
"""Name of the completed state of a run that a person should look at; messages of a deployment go by it."""

_End = TypeVar("_End", bound=State[Any] | BaseException)

_STATES: dict[Status, StateType] = {
    "done": StateType.COMPLETED,
    "partial": StateType.COMPLETED,
    "failed": StateType.FAILED,
    "interrupted": StateType.CANCELLED,
    "killed": StateType.CRASHED,
}


class FlowEndedOffline(Abort):
    """The flow finished while Prefect's server was unreachable; its final state was not reported.

    Attributes:
        end: what the flow would have returned or raised.
    """

    def __init__(self, end: State[Any] | BaseException) -> None:
        super().__init__("Prefect's server is away")
        self.end = end


_ends: list[State[Any] | BaseException] = []


def remember_end(end: _End) -> _End:
    """Keep the end of this process's flow: Prefect loses it if the server's last answer is lost."""
    _ends[:] = [end]
    return end


def flow_result(perform: Callable[[], State[Any]]) -> dict[str, Any]:
    """Return the result of a penstock flow that `perform` calls with `return_state=True`.

    Raises:
        Interrupted: it was stopped; its attribute `result` holds the results so far.
        ServiceError: Prefect's server still refuses a necessary request after retries.
        BaseException: the error of the flow.
    """
    result: Any
    _ends.clear()
    try:
        try:
            state = perform()
        except (PrefectException, httpx.HTTPError, RuntimeError, ValueError) as error:  # the flow's own are in its state
            raise next((end for end in _ends if isinstance(end, BaseException)), None) or ServiceError(
                f"the Prefect server {os.environ.get('PREFECT_API_URL', '')} fails: {first_line(error)}",
                next_step="read its log, then run the same command again: it continues",
            ) from error
        if state.data is None and _ends:  # a repeated request returns the server's copy of the state
            if isinstance(_ends[0], BaseException):
                raise _ends[0]
            state = _ends[0]
        # In a notebook, where an event loop runs, Prefect would return a coroutine.
        result = state.result(raise_on_failure=False, _sync=True)  # type: ignore[call-overload]
    except FlowEndedOffline as ended:
        if isinstance(ended.end, BaseException):
            raise ended.end from None
        state, result = ended.end, ended.end.data
    if state.is_cancelled():
        reached = dict(result) if isinstance(result, dict) else {}
        stopped = Interrupted(reached.pop("signum", signal.SIGTERM), str(state.message))
        stopped.result = reached
        raise stopped
    if not state.is_completed():
        raise result if isinstance(result, BaseException) else RuntimeError(str(state.message))
    return dict(result)


def name_at_begin() -> str:
    """Name a flow run until its run is chosen."""
    request = dict(flow_run.get_parameters()["request"])  # a deployment may give a dict
    asked = Path(request.get("file") or request["input"])
    return f"{asked.parent.name}/{asked.name}, {dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC"


def name_flow_run(name: str, tags: list[str]) -> None:
    """Name and tag the flow run in progress. A server that is away for a moment must not stop the run."""
    identity = flow_run.get_id()
    if identity is None:
        return
    with contextlib.suppress(*AWAY), get_client(sync_client=True) as client:
        client.update_flow_run(UUID(identity), name=name, tags=tags)


def report_end(attempt: Attempt) -> bool:
    """Put the flow run of a finished attempt into its final state: SIGKILL leaves it Running for ever.

    Returns whether the server answered; True, too, if it does not know the flow run.
    """
    if attempt.prefect_flow_run_id is None:
        return True
    identity = UUID(attempt.prefect_flow_run_id)
    vanished = attempt.status == "killed"
    message = f"its process ({attempt.process}) vanished" if vanished else (attempt.error or f"run {attempt.status}")
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(identity).state
            if state is not None and not state.is_final():
                client.set_flow_run_state(identity, State(type=_STATES[attempt.status], message=message), force=True)
    except PrefectException:
        return True
    except AWAY:
        return False
    return True
