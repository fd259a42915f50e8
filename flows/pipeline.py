"""The flow: performs a pipeline in one attempt, or in more if the prepared rows show that another run must do it.

Prefect runs `pipeline`, ad hoc or from a deployment. run/open_attempt.py comes before the stages, run/close_attempt.py after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from prefect import State, flow
from prefect.states import Cancelled, Completed
from prefect.utilities.annotations import quote

from penstock.errors import Interrupted, PenstockError, ShardError
from penstock.flows.run.close_attempt import close_attempt
from penstock.flows.run.flow_runs import NOTABLE, FlowEndedOffline, name_at_begin, remember_end
from penstock.flows.run.open_attempt import RayOnDemand, introduce, open_attempt, reconfirm_run
from penstock.flows.run.reporter import ConsoleReporter
from penstock.flows.run.request import RunRequest
from penstock.flows.servers.services import prepare_environment
from penstock.lease import LeaseHolder
from penstock.machine.stopping import StopRequest, stop_behind, stopping_on_signals
from penstock.plugins import optional
from penstock.redact import hiding_secrets
from penstock.tasks.all_stages import ALL_STAGES
from penstock.tasks.context import Reporter, RunContext
from penstock.tasks.records.at_work import choosing_a_run
from penstock.tasks.stage import Stage, stage_task
from penstock.tasks.stages import STAGES

__all__ = ["pipeline"]


@flow(name="penstock", flow_run_name=name_at_begin, persist_result=False)
def pipeline(request: RunRequest) -> State[Any]:
    """Run or continue the pipeline that `request.file` describes.

    The result is the data of the completed or cancelled state; if the attempt fails, the error's `result`.
    """
    prepare_environment()
    reporter = ConsoleReporter()
    preflight = request.preflight()
    loaded, project = preflight.loaded, preflight.project
    stopping = StopRequest()
    with contextlib.ExitStack() as stack:
        stack.enter_context(hiding_secrets())
        stack.enter_context(_unwrapping_interrupts())
        stack.enter_context(stopping_on_signals(stopping))
        _ = preflight.storage
        held = stack.enter_context(contextlib.ExitStack())  # the run's lease: released after Ray has ended
        need_ray = RayOnDemand(loaded, reporter, stopping, stack)
        before = None
        while True:
            on_wait = partial(_announce_wait, reporter)
            with choosing_a_run(project.storage, loaded.spec.name, stopping.give_up, on_wait) as at_work:
                held.close()
                ctx = open_attempt(request, reporter, stopping, need_ray, held, before, at_work)
                ctx.on_report, ctx.may_overlap = request.on_report, request.until not in ("materialize", "shuffle")
            before = ctx.before
            try:
                end = _attempt(ctx, request)
            except BaseException as error:
                if stopping.lost is not None:  # the records are another process's now
                    ctx.tracker.close(None)
                    raise stopping.lost from error
                result = close_attempt(ctx, "failed", error)
                raised = stop_behind(error) or error
                if isinstance(raised, PenstockError):
                    raised.result = result
                if ctx.attempt.prefect_missed_end:
                    raise FlowEndedOffline(raised) from error
                remember_end(raised)
                raise
            if end is not None and ctx.attempt.prefect_missed_end:
                raise FlowEndedOffline(end)
            if end is not None:
                return remember_end(end)


def _announce_wait(reporter: Reporter, holder: LeaseHolder) -> None:
    reporter.report(f"  waiting for {holder.process}, which begins or repairs a run of this pipeline, or deletes old data")


@contextlib.contextmanager
def _unwrapping_interrupts() -> Iterator[None]:
    """Raise the stop itself if a library wrapped it in an exception of its own."""
    try:
        yield
    except Exception as error:  # of any class
        stopped = stop_behind(error)
        if stopped is None or stopped is error:
            raise
        raise stopped from error


def _attempt(ctx: RunContext, request: RunRequest) -> State[Any] | None:
    """Perform the stages and close the attempt with its status. None: with the prepared rows, another run must do it."""
    try:
        introduce(ctx)
        performed = _perform_stages(ctx, request)
        if ctx.stopping.lost is not None:  # code in between may have ignored it
            raise ctx.stopping.lost
        if not performed:
            close_attempt(ctx, "partial")
            return None
    except Exception as error:  # as in `_unwrapping_interrupts`
        stopped = stop_behind(error)
        if ctx.stopping.lost is not None or not isinstance(stopped, Interrupted):
            raise
        return Cancelled(message=stopped.message, data=close_attempt(ctx, "interrupted", stopped))
    complete = request.until in (None, STAGES[-1])
    result = close_attempt(ctx, "done" if complete else "partial")
    notable = result.get("look_at", ())
    apply_retention = optional("penstock.flows.retention.clean:apply_retention") if complete else None
    data = {**result, **(apply_retention(ctx) if apply_retention is not None else {})}
    message = "\n".join([f"run {ctx.run.run}", *notable])
    return Completed(message=message, data=data, name=NOTABLE if notable else "Completed")


def _perform_stages(ctx: RunContext, request: RunRequest) -> bool:
    """Perform the stages up to `request.until`. False, before `train`: the keys of the prepared rows decide for another run."""
    try:
        for stage in ALL_STAGES:
            ctx.stopping.check()
            if stage.name == "train" and not reconfirm_run(ctx, fresh=request.fresh):
                if ctx.overlapped is not None:  # the next attempt decides by the recorded rows
                    ctx.overlapped.settle(wait=True)
                return False
            if ctx.overlapped is not None and stage.name not in ("shuffle", "train"):
                ctx.overlapped.settle(wait=True)
            _perform_on_whole_rows(ctx, stage)
            if stage.name == request.until:
                break
        if ctx.overlapped is not None:
            ctx.overlapped.settle(wait=True)
        return True
    finally:
        if ctx.overlapped is not None:
            ctx.overlapped.end()


def _perform_on_whole_rows(ctx: RunContext, stage: Stage) -> None:
    """Perform a stage; if it reads a damaged shard, prepare that shard's rows again and repeat."""
    mended: set[str] = set()
    while True:
        try:
            return _perform(ctx, stage)
        except ShardError as error:
            if error.message in mended or STAGES.index(stage.name) <= STAGES.index("materialize"):
                raise
            mended.add(error.message)
            ctx.warn(f"{stage.name}: {error.message}: its rows are prepared again")
            _perform(ctx, next(stage for stage in ALL_STAGES if stage.name == "materialize"))


def _perform(ctx: RunContext, stage: Stage) -> None:
    # Quoted, so that Prefect does not search the context for futures.
    state = stage_task(stage)(quote(ctx), return_state=True)
    if state.is_cancelled():
        raise Interrupted(ctx.stopping.signum, str(state.message))
    state.result(raise_on_failure=True, _sync=True)  # type: ignore[call-overload]  # as in flows/verbs/run.py
