"""End an attempt: return its result, and record its status in the ledger, in Prefect and at the tracker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect.utilities.urls import url_for

from penstock.errors import PenstockError, ServiceError
from penstock.flows.run.flow_runs import name_flow_run
from penstock.flows.run.repair import TRACKED_STATUS
from penstock.messages import counted, describe_error
from penstock.plugins import optional
from penstock.redact import redact_text
from penstock.tasks.context import RunContext
from penstock.tasks.prefect_away import prefect_answers
from penstock.tasks.records.ledger import Status, utc_now
from penstock.tasks.register import describe
from penstock.training.checkpoint.store import CheckpointStore

__all__ = ["close_attempt"]

PREFECT_BACK_S = 30.0
"""Seconds to wait for a Prefect server that is away; an embedded one is restarted by then."""


def close_attempt(ctx: RunContext, status: Status, error: BaseException | None = None, note: str = "") -> dict[str, Any]:
    """Record the attempt's end, and return its result. Safe to call when something has failed already.

    Args:
        error: the cause of the end; if given, a failure to write the record only warns, so that it does not hide this error.
        note: first paragraph of the tracked run's description.
    """
    if ctx.attempt.ended is not None:
        return ctx.run.result
    result = _result(ctx, status)
    done = {"done_key": ctx.keys["train"].key} if status == "done" else {}
    ctx.run = ctx.run.model_copy(update={"status": status, "result": result, **done})
    # Before waiting for the tracker: a signal there must not leave a finished run unrecorded.
    unrecorded = _failure_of(lambda: ctx.ledger.save_run(ctx.run))
    if status == "done":
        result["look_at"] = _what_to_look_at(ctx, result)
    if unrecorded is not None and error is None:
        raise unrecorded
    ended = {name: result[name] for name in ("status", "stages", "exactness", "metrics", "warnings")}
    reported = error.with_next_step(ctx.attempt.command) if isinstance(error, PenstockError) else error
    registered = ctx.outcomes.get("register")
    if registered is not None and registered.outcome != "reused":
        ended["model_uri"] = registered.output.get("uri")
    ended |= {"ended": utc_now(), "error": redact_text(str(reported)) if reported else None}
    ctx.attempt = ctx.attempt.model_copy(update=ended)
    tags = {"penstock.exactness": result["exactness"] or "not reached", "penstock.status": status}
    ctx.tracker.set_tags({**tags, "description": "\n\n".join(filter(None, [note, _description(ctx)]))})
    if prefect_answers(PREFECT_BACK_S):
        name_flow_run(_flow_run_name(ctx, status), [ctx.run.pipeline, ctx.run.run, status])
    else:
        ctx.attempt = ctx.attempt.model_copy(update={"prefect_missed_end": True})
        ctx.reporter.warn("the Prefect server is away and lacks the end of this attempt; the next run or status sends it")
    _attach_report(ctx)
    unsent = ctx.tracker.close(TRACKED_STATUS[status])
    if ctx.tracker.all_sent:
        ctx.attempt = ctx.attempt.model_copy(update={"sent_to": ctx.tracker.run_id})
    if unsent:
        waits = counted(unsent, "record waits", "records wait")
        ctx.reporter.warn(f"{waits} for the tracking server; the next penstock run or status sends what is left")
    if unrecorded is None:
        # Last: a later command repairs an attempt that is still marked as running.
        unrecorded = _failure_of(lambda: ctx.ledger.save_attempt(ctx.run.run, ctx.attempt))
    if unrecorded is not None:  # a full disk, for instance
        ctx.reporter.warn(f"the end of this attempt is not on record ({unrecorded}); the next run or status repairs that")
    return result


def _flow_run_name(ctx: RunContext, status: Status) -> str:
    """Name the flow run after the run's id, the attempt, its status and main metric."""
    performed = [outcome.outcome for outcome in ctx.outcomes.values()]
    nothing_new = status == "done" and set(performed) == {"reused"} and ctx.run.sweep != ctx.run.run
    how = "all reused" if nothing_new else status
    names = (f"{split}/{name}" for split in ("test", "val") for name in ("accuracy", "r2", "loss"))
    metric = next((name for name in names if name in ctx.attempt.metrics), None)
    result = f", {metric} {ctx.attempt.metrics[metric]:.4f}" if metric is not None and status == "done" else ""
    return f"{ctx.run.run} attempt {ctx.attempt.number}: {how}{result}"


def _attach_report(ctx: RunContext) -> None:
    """Send the page of the run to the tracker, unless all stages were reused."""
    if all(outcome.outcome == "reused" for outcome in ctx.outcomes.values()):
        return
    try:
        if report_page := optional("penstock.flows.history.report:report_page"):
            ctx.tracker.log_text("report.html", report_page(ctx.ledger, ctx.run, ctx.attempt))
    except Exception as error:  # of any class: a page must not fail a run
        ctx.reporter.warn(f"no report: {describe_error(error)}")


def _description(ctx: RunContext) -> str:
    """Describe result, model and data in a paragraph each, and link the attempt in Prefect."""
    found = describe(ctx)
    if ctx.attempt.prefect_flow_run_id is not None:
        page = url_for("flow-run", obj_id=ctx.attempt.prefect_flow_run_id)
        found += [f"[Attempt {ctx.attempt.number} in Prefect]({page})"] if page is not None else []
    return "\n\n".join(found)


def _what_to_look_at(ctx: RunContext, result: dict[str, Any]) -> list[str]:
    """Warn of a fall of quality and of drift since the run before; return these lines, and a move of the alias."""
    found: list[str] = []
    if "register" not in ctx.outcomes:  # of a sweep, or stopped before it
        return found
    trained = ctx.outcomes["train"].outcome != "reused"
    before = ctx.before if trained else None
    if before is not None and before.run != ctx.run.run and before.result.get("metrics"):
        try:
            if what_to_look_at := optional("penstock.flows.history.comparison:what_to_look_at"):
                found = what_to_look_at(ctx.ledger, before, ctx.run)
        except Exception as error:  # of any class: a comparison must not fail a run
            ctx.reporter.warn(f"not compared with run {before.run}: {describe_error(error)}")
    for line in found:
        ctx.warn(line)
    if found and before is not None:
        ctx.reporter.report(f"look at it: penstock compare {before.run} {ctx.run.run}")
    promotion, register = result["promotion"] or {}, ctx.project.spec.register_
    if promotion.get("moved") and register.promote is not None and ctx.outcomes["register"].outcome != "reused":
        found.append(f"alias {register.alias!r} is at {result['model_uri']} now: {promotion['reason']}")
    return found


def _result(ctx: RunContext, status: Status) -> dict[str, Any]:
    """Make the result of the attempt, which `penstock run --json` prints and the run's record keeps."""
    outputs = {name: outcome.output for name, outcome in ctx.outcomes.items()}
    trained, evaluated, registered = (outputs.get(name, {}) for name in ("train", "evaluate", "register"))
    result = {
        "status": status,
        "run": ctx.run.run,
        f"{ctx.run.tracker}_run_id": ctx.run.tracking_runs[ctx.run.tracker],
        "attempt": ctx.attempt.number,
        "exactness": trained.get("exactness") or ctx.attempt.exactness,
        "stages": [
            {"name": o.name, "key": o.key, "outcome": o.outcome, "seconds": round(o.seconds, 3), "because": list(o.because)}
            | {"began": o.began, "tasks": ctx.task_counts.of(o.name)}
            for o in ctx.outcomes.values()
        ],
        "metrics": {**trained.get("metrics", {}), **evaluated.get("metrics", {})},
        # The evaluated and registered checkpoint; before that, the newest.
        "checkpoint": trained.get("best_checkpoint") or trained.get("checkpoint") or _newest_checkpoint(ctx),
        "checkpoints": _checkpoint_folders(ctx, trained),
        "returned": trained.get("returned"),
        "model_uri": registered.get("uri"),
        "promotion": registered.get("promotion"),
        "url": ctx.tracker.url,
        "weights_digest": trained.get("weights_digest"),
        "fetched_by_node": {node: fetched.model_dump() for node, fetched in ctx.attempt.fetched.items()},
        "warnings": ctx.warnings,
    }
    return {**result, "signum": ctx.stopping.signum} if status == "interrupted" else result


def _checkpoint_folders(ctx: RunContext, trained: dict[str, Any]) -> dict[str, str | None]:
    """Return the address of the plain folder of the last and the best checkpoint: what a function reported, else all files."""
    inside = "/folder" if ctx.project.spec.train.loop is not None else ""
    names = {"last": trained.get("checkpoint"), "best": trained.get("best_checkpoint")}
    return {
        which: f"{ctx.work_storage.uri(f'checkpoints/{name}')}{inside}" if name is not None else None
        for which, name in names.items()
    }


def _newest_checkpoint(ctx: RunContext) -> str | None:
    """Return the checkpoint from which the next attempt would continue."""
    try:
        committed = CheckpointStore(ctx.work_storage).committed()
    except (OSError, PenstockError):
        return None  # reported already, or by the next attempt
    return committed[0].name if committed else None


def _failure_of(save: Callable[[], None]) -> OSError | ServiceError | None:
    """Write a record; return the error if it fails."""
    try:
        save()
    except (OSError, ServiceError) as failure:
        return failure
    return None
