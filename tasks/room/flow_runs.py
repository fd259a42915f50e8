"""Which flow runs does a Prefect server keep of runs that are cleaned, and how are they deleted?

Only called for penstock's own server: on any other they are not ours to delete.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter, FlowRunFilterTags

from penstock.errors import ServiceError
from penstock.redact import first_line
from penstock.tasks.prefect_away import AWAY

__all__ = ["remove_flow_runs"]


_PAGE_ROWS = 200
"""What the server gives at most of one list."""


def remove_flow_runs(pipeline: str, gone: Collection[str]) -> int:
    """Delete the flow runs of some runs of a pipeline, with their task runs, states, logs and artifacts; returns how many.

    They are found by their tags, so what this costs goes by what is there, and not by how many runs are on record. A flow run
    goes after its artifacts: what a killed call leaves is found again by the next.

    Args:
        gone: the runs.

    Raises:
        ServiceError: the server does not answer, or refuses.
    """
    try:
        with get_client(sync_client=True) as client:
            old = list(_flow_runs_of(client, pipeline, frozenset(gone)))
            for identity in old:
                of_it = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[identity]))
                while found := client.read_artifacts(artifact_filter=of_it, limit=_PAGE_ROWS):
                    for artifact in found:
                        client.delete_artifact(artifact.id)
                client.delete_flow_run(identity)
    except AWAY as error:
        raise ServiceError(
            f"the flow runs of cleaned runs cannot be deleted at {os.environ.get('PREFECT_API_URL', '')}: {first_line(error)}",
            next_step="clean again: what is left is found",
        ) from error
    return len(old)


def _flow_runs_of(client: SyncPrefectClient, pipeline: str, runs: frozenset[str]) -> Iterator[UUID]:
    """Of each attempt: it is tagged with the pipeline and the run."""
    chosen, offset = FlowRunFilter(tags=FlowRunFilterTags(all_=[pipeline])), 0
    while page := client.read_flow_runs(flow_run_filter=chosen, limit=_PAGE_ROWS, offset=offset):
        yield from (each.id for each in page if runs.intersection(each.tags))
        offset += len(page)
