"""How is one stage performed? Believe a verified record with the same key, else run, then record: the same for every stage.

A stage is a Prefect task so that people see it, retry it and time it; Prefect's own result persistence is off, because its
defaults lose results silently. The record in the storage is what makes a stage done.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect import State, Task, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun
from prefect.states import Cancelled, Completed

from penstock.errors import Interrupted, PenstockError, ServiceError
from penstock.machine.prints import passing_prints
from penstock.redact import hiding_secrets
from penstock.storage import Storage
from penstock.tasks.context import Outcome, RunContext, StageOutcome
from penstock.tasks.prefect_away import AWAY, prefect_answers
from penstock.tasks.project import Project
from penstock.tasks.records.changes import why_run
from penstock.tasks.records.ledger import StageRecord, utc_now
from penstock.tasks.stages import StageName

__all__ = ["Stage", "VerifyContext", "perform", "stage_task"]

Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class VerifyContext:
    """What a stage's `verify` works with.

    Attributes:
        deep: read and hash the data too; without it only presence and sizes are checked.
        will_train: training has something left to do, so it will read the rows.
        state_dir: folder on this machine for the files of embedded services, such as MLflow's model registry.
        upstream: outputs of the stages before, as far as they are known.
    """

    project: Project
    run_id: str
    deep: bool
    will_train: bool = False
    state_dir: Path = Path()
    upstream: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def run_storage(self) -> Storage:
        """Return the run's own files."""
        return self.project.storage.child(f"runs/{self.run_id}")


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline.

    Attributes:
        run: does the work; returns (output as small JSON, `ran` or `resumed`).
        facts: key figures of the output, for people.
        verify: returns the problem with the data of a recorded output, or None; by default the record is all there is.
        as_of_now: the output of a reused stage as shown, updated where others may have changed it since (an alias).
        publish: shows the output to the tracker once it is recorded, in every attempt, reused or not, so it must be safe to
            repeat; of `train` it also deletes the checkpoints that `keep: 0` no longer keeps.
        of_run: the output belongs to one run (a trained model), not to every run with the same key.
    """

    name: StageName
    run: Callable[[RunContext], tuple[dict[str, Any], Outcome]]
    facts: Callable[[dict[str, Any]], Facts]
    verify: Callable[[VerifyContext, dict[str, Any]], str | None] = lambda _context, _output: None
    of_run: bool = False
    publish: Callable[[RunContext, dict[str, Any]], None] = lambda _ctx, _output: None
    as_of_now: Callable[[RunContext, dict[str, Any]], dict[str, Any]] = lambda _ctx, output: output

    def record_path(self, run_id: str, key: str) -> str:
        """Return the record's path in the storage."""
        return f"runs/{run_id}/stages/{self.name}.json" if self.of_run else f"stages/{self.name}/{key}.json"


def stage_task(stage: Stage) -> Task[[RunContext], Any]:
    """Wrap a stage as a Prefect task that takes a RunContext and gives a StageOutcome."""

    @task(
        name=stage.name,
        task_run_name=stage.name,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=2,
        retry_delay_seconds=[1, 5],
        retry_condition_fn=_is_transient,
    )
    def run_stage(ctx: RunContext) -> State[Any]:
        try:
            with hiding_secrets():
                outcome = perform(stage, ctx)
        except Interrupted as stopped:
            return Cancelled(message=stopped.message)
        _publish(ctx, outcome)
        name = "Reused" if outcome.outcome == "reused" else "Completed"
        return Completed(name=name, message=_sentence(outcome), data=outcome)

    return run_stage


def perform(stage: Stage, ctx: RunContext) -> StageOutcome:
    """Reuse the stage's output if its record can be believed, else run it and record it."""
    started = time.monotonic()
    key = ctx.keys[stage.name]
    path = stage.record_path(ctx.run.run, key.key)
    record = ctx.ledger.stage_record(path, key.key)
    if record is not None:
        context = VerifyContext(
            ctx.project,
            ctx.run.run,
            deep=ctx.will_train,
            will_train=ctx.will_train,
            state_dir=ctx.state_dir,
            upstream={name: outcome.output for name, outcome in ctx.outcomes.items()},
        )
        # Whether training is done was found out by reading its checkpoint, when this attempt was opened.
        is_verified = stage.name == "train" and not ctx.will_train
        problem = None if is_verified else stage.verify(context, record.output)
        if problem is None:
            by = f" by run {record.run}" if record.run not in ("", ctx.run.run) else ""
            because = [f"nothing it depends on has changed since it was made, {record.made}{by}"]
            return _done(ctx, stage, key.key, "reused", started, record.output, because)
        ctx.warn(f"{stage.name}: the recorded output is not used: {problem}")
        because = [problem]
    else:
        because = why_run(stage.name, key, ctx.before, ctx.run.run)
    with passing_prints(lambda line: ctx.reporter.report(f"{stage.name}: {line}")):
        output, outcome = stage.run(ctx)
    if outcome == "resumed":
        because = [f"it continued from the checkpoint of step {ctx.attempt.resumed_from_step or 0:,}", *because]

    def keep(output: dict[str, Any], outcome: Outcome = "ran") -> StageOutcome:
        made = StageRecord(
            stage=stage.name,
            key=key.key,
            inputs=key.inputs,
            output=output,
            seconds=time.monotonic() - started,
            made=utc_now(),
            run=ctx.run.run,
        )
        ctx.ledger.save_stage(path, made)
        return _done(ctx, stage, key.key, outcome, started, output, because)

    if outcome != "begun" or ctx.overlapped is None:
        return keep(output, outcome)
    ctx.overlapped.record = keep
    seconds, facts = time.monotonic() - started, stage.facts(output)[:1]
    begun = StageOutcome(stage.name, key.key, "begun", seconds, output, facts, tuple(because), _utc_before(seconds))
    ctx.outcomes[stage.name] = begun
    ctx.reporter.finished(begun)
    return begun


def _done(
    ctx: RunContext, stage: Stage, key: str, how: Outcome, started: float, output: dict[str, Any], because: Sequence[str]
) -> StageOutcome:
    facts = stage.facts(stage.as_of_now(ctx, output) if how == "reused" else output)
    seconds = time.monotonic() - started
    outcome = StageOutcome(stage.name, key, how, seconds, output, facts, tuple(because), _utc_before(seconds))
    ctx.outcomes[stage.name] = outcome
    stage.publish(ctx, output)
    ctx.reporter.finished(outcome)
    return outcome


def _utc_before(seconds: float) -> str:
    return (dt.datetime.now(dt.UTC) - dt.timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def _publish(ctx: RunContext, outcome: StageOutcome) -> None:
    if not prefect_answers():
        return  # reported once, at the end of the attempt
    rows = [{"name": label, "value": value} for label, value in outcome.facts]
    rows += [
        {"name": "outcome", "value": outcome.outcome},
        {"name": "because", "value": "; ".join(outcome.because)},
        {"name": "seconds", "value": f"{outcome.seconds:.2f}"},
        {"name": "key", "value": outcome.key},
    ]
    try:
        create_table_artifact(
            key=f"{ctx.run.pipeline.replace('_', '-')}-{outcome.name}",
            table=rows,
            description=f"**{outcome.name}** of run {_linked(ctx)}{_changed(ctx)}",
        )
    except AWAY as error:
        # An artifact is for reading; a server that drops one must not fail a stage whose output is safe.
        ctx.warn(f"{outcome.name}: no Prefect artifact: {error}")


def _linked(ctx: RunContext) -> str:
    """Return the run, with a link to its page at the tracker."""
    page = ctx.tracker.url
    return f"[{ctx.run.run}]({page})" if page is not None else f"`{ctx.run.run}`, tracked as `{ctx.tracker.run_id}`"


def _changed(ctx: RunContext) -> str:
    """Format what had changed since the attempt before as a list."""
    lines = [f"\n- {line}" for line in ctx.attempt.changed]
    return "".join(["\n\nChanged since the attempt before:\n", *lines]) if lines else ""


def _sentence(outcome: StageOutcome) -> str:
    facts = ", ".join(f"{label} {value}" for label, value in outcome.facts[:3])
    return f"{outcome.outcome} in {outcome.seconds:.1f} s" + (f": {facts}" if facts else "")


def _is_transient(_task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
    """Return whether Prefect runs the stage again; errors that would come back end it.

    True for a ServiceError that restarts of workers have not met already, a ConnectionError or a TimeoutError.
    """
    error = state.result(raise_on_failure=False)
    if isinstance(error, ServiceError):
        return not error.retried
    if isinstance(error, PenstockError):
        return False
    return isinstance(error, ConnectionError | TimeoutError)
