"""How is a pipeline run in this process, without Prefect and Ray, so that many runs are cheap?

Stages, records, lease, checkpoints, tracker and registry are the real ones; rows are prepared, and the one rank trains, here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import lease
from penstock.errors import PenstockError, TrainingError
from penstock.flows.preflight.checks import check_storage
from penstock.flows.run import close_attempt as closing
from penstock.flows.run import open_attempt as opening
from penstock.flows.run.reporter import ConsoleReporter
from penstock.flows.run.request import RunRequest
from penstock.ingest.ray_tasks import local_map
from penstock.machine.stopping import StopRequest
from penstock.tasks.all_stages import ALL_STAGES
from penstock.tasks.context import RunContext
from penstock.tasks.records.at_work import choosing_a_run
from penstock.tasks.stage import perform
from penstock.tasks.stages import StageName
from penstock.training.checkpoint.outcome import outcome_of
from penstock.training.events import Event
from penstock.training.job import TrainJob, TrainOutcome
from penstock.training.on_ray import trainer
from penstock.training.on_ray.worker import run_rank
from penstock.training.ranks import Group
from tests.training.digits import ListClient

__all__ = ["leave_out_servers", "run_here"]


def _train_here(
    job: TrainJob, *, stop: threading.Event, listener: Callable[[list[Event]], None], **_others: Any
) -> TrainOutcome:
    """In place of Ray Train: the one rank, here."""
    client = ListClient()
    try:
        result = run_rank(job, Group(0, 1, torch.device("cpu")), client)
    except PenstockError:
        raise
    except Exception as error:  # as `EventLog.error` does
        raise TrainingError(f"training failed: {type(error).__name__}: {error}") from error
    finally:
        listener(client.events)
    return outcome_of(job, result.status, exactness=result.exactness, resumed_from_step=result.resumed_from_step)


def leave_out_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `run_here` need no server until the test ends."""
    monkeypatch.setattr(closing, "prefect_answers", lambda _within_s: True)  # there is no flow run to report
    monkeypatch.setattr(trainer, "train", _train_here)
    monkeypatch.setattr(RunContext, "parallel", lambda _ctx, _stage: local_map)
    monkeypatch.setattr(lease, "SETTLE_S", 0.0)  # for racers of other machines


class _NoRay:
    """In place of `RayOnDemand`: everything runs in this process."""

    reporter = ConsoleReporter()

    def __call__(self) -> bool:
        return True


def run_here(
    file: Path,
    overrides: Sequence[str] = (),
    *,
    until: StageName | None = None,
    meanwhile: Callable[[str], None] = lambda _stage: None,
) -> dict[str, Any]:
    """One attempt at `penstock run FILE`, as the command reports it; raises what ends it.

    Args:
        until: the last stage to perform.
        meanwhile: called with the name of each stage before it is performed.
    """
    stopping = StopRequest()
    request = RunRequest(file=str(file), overrides=list(overrides), until=until)
    project = request.preflight().project
    check_storage(project.storage)
    with contextlib.ExitStack() as held:
        before = None
        while True:
            with choosing_a_run(project.storage, project.spec.name, stopping.give_up) as at_work:
                held.close()
                ctx = opening.open_attempt(
                    request, ConsoleReporter(), stopping, _NoRay(), held, before, at_work  # type: ignore[arg-type]
                )  # fmt: skip
            before = ctx.before
            try:
                if _perform_stages(ctx, request, meanwhile):
                    return closing.close_attempt(ctx, "done" if until is None else "partial")
            except BaseException as error:
                closing.close_attempt(ctx, "failed", error)
                raise
            closing.close_attempt(ctx, "partial")


def _perform_stages(ctx: RunContext, request: RunRequest, meanwhile: Callable[[str], None]) -> bool:
    """As the flow does: False where the prepared rows belong to another run."""
    opening.introduce(ctx)
    for stage in ALL_STAGES:
        meanwhile(stage.name)
        if stage.name == "train" and not opening.reconfirm_run(ctx, fresh=False):
            return False
        perform(stage, ctx)
        if stage.name == request.until:
            break
    return True
