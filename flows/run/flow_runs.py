"""What does Prefect's own record of an attempt say? A readable name, and the truth about a process that vanished."""

from __future__ import annotations

import contextlib
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run
from prefect.states import Crashed

from penstock.tasks.ledger import Attempt

__all__ = ["mark_crashed", "name_flow_run"]


def name_flow_run(name: str, tags: list[str]) -> None:
    """Name and tag the flow run in progress. A server that is away for a moment must not stop the run."""
    identity = flow_run.get_id()
    if identity is None:
        return
    with contextlib.suppress(PrefectException, OSError), get_client(sync_client=True) as client:
        client.update_flow_run(UUID(identity), name=name, tags=tags)


def mark_crashed(attempt: Attempt) -> None:
    """Put the flow run of a vanished attempt into Crashed: SIGKILL leaves it Running for ever."""
    if attempt.prefect_flow_run_id is None:
        return
    identity = UUID(attempt.prefect_flow_run_id)
    with contextlib.suppress(PrefectException, OSError), get_client(sync_client=True) as client:
        state = client.read_flow_run(identity).state
        if state is not None and not state.is_final():
            crashed: State[None] = Crashed(message=f"its process ({attempt.process}) vanished")
            client.set_flow_run_state(identity, crashed, force=True)
