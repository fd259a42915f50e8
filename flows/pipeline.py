"""The flow: one attempt at one run of a pipeline, from the file to the registered model.

`pipeline` is what Prefect runs, ad hoc or from a deployment. It owns every effect that is not a stage's: the lease, the run's
records, the choice of the run to continue, and the honest status at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import yaml
from prefect import State, flow
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed
from prefect.utilities.annotations import quote
from pydantic import BaseModel, Field

from penstock.errors import Interrupted, PenstockError, ResumeError, ServiceError
from penstock.flows.run.cancel_watch import cancel_becomes_sigterm
from penstock.flows.run.command_line import run_command
from penstock.flows.run.cpus import cpus_needed, cpus_refused
from penstock.flows.run.decisions import Continue, Refuse, choose_run, past_of
from penstock.flows.run.environment import describe_environment, git_commit
from penstock.flows.run.flow_runs import name_flow_run
from penstock.flows.run.preflight import check_machine, check_recipe, check_resources, check_room, check_storage, gpus_refused
from penstock.flows.run.repair import TRACKED_STATUS, close_attempts, repair_run
from penstock.flows.run.reporter import make_reporter
from penstock.flows.run.try_batch import try_one_batch
from penstock.flows.servers.services import ray_cluster, telemetry_off
from penstock.flows.spec_file import LoadedSpec, load_spec
from penstock.lease import hold_lease
from penstock.redact import redact_text
from penstock.stopping import StopRequest, stop_behind, stopping_on_signals
from penstock.tasks.context import Reporter, RunContext
from penstock.tasks.evaluate import evaluate
from penstock.tasks.keys import StageKey, stage_keys
from penstock.tasks.ledger import Attempt, Ledger, Run, Status, lease_path, utc_now
from penstock.tasks.materialize import STAGE as MATERIALIZE
from penstock.tasks.materialize import materialize
from penstock.tasks.preprocess import preprocess
from penstock.tasks.project import Project
from penstock.tasks.read import read
from penstock.tasks.register import register
from penstock.tasks.shuffle import shuffle
from penstock.tasks.stage import Look
from penstock.tasks.train import STAGE as TRAIN
from penstock.tasks.train import train
from penstock.training.checkpoint.journal import read_journal
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.tracking.registry import TRACKERS

if TYPE_CHECKING:
    from penstock.flows.servers.ray_local import RayCluster

__all__ = ["RunRequest", "last_result", "pipeline"]

StageName = Literal["read", "preprocess", "materialize", "shuffle", "train", "evaluate", "register"]
_BEFORE_TRAINING = ("read", "preprocess", "materialize", "shuffle")
"""A run that stops after one of these may prepare rows on a machine without the training's GPUs."""
_TASKS = (read, preprocess, materialize, shuffle, train, evaluate, register)

last_result: dict[str, Any] = {}
"""What the newest attempt of this process reported. A cancelled flow has no result, so it is kept here."""


class RunRequest(BaseModel):
    """What to run: the form a Prefect deployment shows."""

    file: str = Field(description="Path of the pipeline file.")
    overrides: list[str] = Field(default_factory=list, description="Changes of single values, such as `train.epochs=3`.")
    fresh: bool = Field(default=False, description="Start a new run instead of continuing the last one.")
    until: StageName | None = Field(default=None, description="Stop after this stage.")


@flow(name="penstock", persist_result=False)
def pipeline(request: RunRequest) -> State[Any]:
    """Run or continue the pipeline that `request.file` describes."""
    last_result.clear()
    telemetry_off()
    reporter = make_reporter()
    loaded = load_spec(request.file, request.overrides)
    project = Project(loaded.spec, loaded.base_dir, loaded.origins)
    stopping = StopRequest()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_stops_told_as_such())
        stack.enter_context(stopping_on_signals(stopping))
        stack.enter_context(cancel_becomes_sigterm(stopping.stop))
        check_storage(project.storage)
        stack.enter_context(hold_lease(project.storage, lease_path(loaded.spec.name), on_lost=stopping.stop.set))
        ctx = _begin(request, loaded, project, reporter, stopping, stack)
        try:
            return _attempt(ctx, request.until)
        except BaseException as error:
            _finish(ctx, "failed", error)
            raise


@contextlib.contextmanager
def _stops_told_as_such() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a stop may have been turned into any class; what is no stop is raised as it was
        stopped = stop_behind(error)
        if stopped is None or stopped is error:
            raise
        raise stopped from error


def _begin(
    request: RunRequest,
    loaded: LoadedSpec,
    project: Project,
    reporter: Reporter,
    stopping: StopRequest,
    stack: contextlib.ExitStack,
) -> RunContext:
    """Choose the run, repair what a vanished attempt left, and open the records of this attempt."""
    ledger = Ledger(project.storage)
    keys = stage_keys(project)
    check_recipe(project)
    tracked_by = loaded.spec.tracking.tracker
    tracking = TRACKERS.get(tracked_by)
    current = _current(ledger, loaded.spec.name, request.fresh, reporter)
    run = _choose(ledger, loaded, keys, request, current, reporter)
    will_train = not _trained(ledger, project, run, keys)
    prepared = ledger.stage_record(MATERIALIZE.record_path(run.run, keys["materialize"].key), keys["materialize"].key)
    if prepared is None:
        for warning in check_resources(project):
            reporter.warn(warning)
    if will_train and request.until not in _BEFORE_TRAINING:
        check_machine(loaded.spec)
    if will_train and not CheckpointStore(ledger.run_storage(run.run)).committed():
        tried = try_one_batch(project)
        for warning in check_room(project, tried["parameters"], tried["weights_bytes"], tried["checkpoint_bytes"]):
            reporter.warn(warning)
    if current is not None and current.run == run.run:
        close_attempts(ledger, current)
    elif current is not None:
        repair_run(ledger, current, loaded.state_dir)
    attempt = ledger.new_attempt(run.run, flow_run.get_id())
    try:
        ledger.save_run(run)
        ledger.make_current(run)
        name_flow_run(f"{run.pipeline} attempt {attempt.number}", [run.pipeline, run.run])
        tracker = tracking.open(
            tracking.default_uri(loaded.state_dir),
            experiment=loaded.spec.name,
            run_name=run.run,
            run_id=run.tracking_runs.get(tracked_by),
            tags=_tags(run, attempt, keys, loaded),
            params=run.spec,
            attempt=attempt.number,
            outbox=ledger.run_storage(run.run),
        )
    except BaseException as error:
        status = "interrupted" if stop_behind(error) is not None else "failed"
        ended = {"status": status, "ended": utc_now(), "error": redact_text(str(error))}
        with contextlib.suppress(OSError, ServiceError):  # what stopped the attempt is the news
            ledger.save_attempt(run.run, attempt.model_copy(update=ended))
            ledger.save_run(run.model_copy(update={"status": status}))
        raise
    clusters: list[RayCluster] = []

    def need_ray() -> bool:
        if clusters:
            return clusters[0].embedded
        reporter.say("  connecting to Ray")
        cluster = stack.enter_context(ray_cluster(loaded.state_dir, min_cpus=cpus_needed(loaded.spec)))
        clusters.append(cluster)
        # A signal while Ray starts ends up in Ray's hands.
        stopping.check()
        refusal = cpus_refused(loaded.spec, cluster.num_cpus) or gpus_refused(loaded.spec, cluster.num_gpus)
        if refusal is not None:
            raise refusal
        return cluster.embedded

    return RunContext(
        project=project,
        keys=keys,
        ledger=ledger,
        run=run.model_copy(update={"tracking_runs": {**run.tracking_runs, tracked_by: tracker.run_id}}),
        attempt=attempt,
        tracker=tracker,
        reporter=reporter,
        state_dir=loaded.state_dir,
        need_ray=need_ray,
        stopping=stopping,
        will_train=will_train,
    )


def _introduce(ctx: RunContext) -> None:
    """Note which tracked run this is, and tell it what it should know before the first stage."""
    ctx.ledger.save_run(ctx.run)
    own = ctx.work_storage
    committed = CheckpointStore(own).committed()
    if committed:
        # Those before the checkpoint may not have reached the server; those beyond it are measured again.
        ctx.tracker.replay(read_journal(own, committed[0].manifest.step, after_step=ctx.tracker.complete_step()))
    resolved = {"spec": ctx.run.spec, "origins": ctx.run.origins}
    ctx.tracker.log_text(f"attempt-{ctx.attempt.number}/spec.yaml", yaml.safe_dump(resolved, sort_keys=False))
    ctx.tracker.log_text(f"attempt-{ctx.attempt.number}/environment.txt", describe_environment())
    ctx.reporter.say(f"{ctx.run.pipeline}: run {ctx.run.run}, attempt {ctx.attempt.number}")


def _current(ledger: Ledger, pipeline: str, fresh: bool, reporter: Reporter) -> Run | None:
    """The run to continue; with `fresh` an unreadable one is no hindrance."""
    try:
        return ledger.current_run(pipeline)
    except ResumeError as error:
        if not fresh:
            raise
        reporter.warn(error.message)
        return None


def _trained(ledger: Ledger, project: Project, run: Run, keys: dict[str, StageKey]) -> bool:
    """Whether training has nothing left to do."""
    key = keys["train"].key
    record = ledger.stage_record(TRAIN.record_path(run.run, key), key)
    return record is not None and TRAIN.distrust(Look(project, run.run, deep=True), record.output) is None


def _choose(
    ledger: Ledger,
    loaded: LoadedSpec,
    keys: dict[str, StageKey],
    request: RunRequest,
    current: Run | None,
    reporter: Reporter,
) -> Run:
    spec = loaded.spec.model_dump(mode="json", by_alias=True)
    # With --fresh the checkpoints are not even looked at: they may be the reason for it.
    past = None if request.fresh or current is None else past_of(ledger, current)
    decision = choose_run(past, spec["train"], keys, fresh=request.fresh)
    if isinstance(decision, Refuse):
        raise ResumeError(
            f"run {decision.run.run} is not finished, and it cannot continue with what changed since its last attempt",
            problems=decision.changes,
            next_step=f"undo the change, or begin a new run: {run_command(request.file, request.overrides, '--fresh')}",
        )
    if isinstance(decision, Continue):
        for warning in decision.warnings:
            reporter.warn(f"changed since the last attempt: {warning}")
        return decision.run.model_copy(update={"spec": spec, "origins": loaded.origins, "keys": keys, "status": "running"})
    if current is not None:
        reporter.say(f"a new run: {decision.reason}")
    return ledger.new_run(loaded.spec.name, spec).model_copy(update={"origins": loaded.origins, "keys": keys})


def _attempt(ctx: RunContext, until: str | None) -> State[Any]:
    """Perform the stages in order and close the attempt with an honest status."""
    try:
        _introduce(ctx)
        for stage in _TASKS:
            ctx.stopping.check()
            # Quoted, so that Prefect does not search the context for futures.
            state = stage(quote(ctx), return_state=True)
            if state.is_cancelled():
                raise Interrupted(ctx.stopping.signum, str(state.message))
            state.result(raise_on_failure=True)
            if stage.name == until:
                break
    except Exception as error:  # as in `_stops_told_as_such`
        stopped = stop_behind(error)
        if stopped is None:
            raise
        _finish(ctx, "interrupted", stopped)
        return Cancelled(message=stopped.message)
    complete = until in (None, _TASKS[-1].name)
    _finish(ctx, "done" if complete else "partial", None)
    return Completed(message=f"run {ctx.run.run}", data=dict(last_result))


def _finish(ctx: RunContext, status: Status, error: BaseException | None) -> None:
    """Write the attempt's end everywhere it is looked up; safe to call when something has failed already."""
    if ctx.attempt.ended is not None:
        return
    stages = [
        {"name": o.name, "key": o.key, "outcome": o.outcome, "seconds": round(o.seconds, 3)} for o in ctx.outcomes.values()
    ]
    trained = ctx.outcomes["train"].output if "train" in ctx.outcomes else {}
    registered = ctx.outcomes["register"].output if "register" in ctx.outcomes else {}
    evaluated = ctx.outcomes["evaluate"].output if "evaluate" in ctx.outcomes else {}
    exactness = trained.get("exactness") or ctx.attempt.exactness
    ended = ctx.attempt.model_copy(
        update={
            "ended": utc_now(),
            "status": status,
            "stages": stages,
            "error": redact_text(str(error)) if error else None,
            "exactness": exactness,
        }
    )
    last_result.update(
        status=status,
        run=ctx.run.run,
        **{f"{ctx.run.tracker}_run_id": ctx.run.tracking_runs[ctx.run.tracker]},
        attempt=ctx.attempt.number,
        exactness=exactness,
        stages=stages,
        metrics={**trained.get("metrics", {}), **evaluated.get("metrics", {})},
        # The one that the digest is of, and that is evaluated and registered; of a run that did not get there, the newest.
        checkpoint=trained.get("best_checkpoint") or trained.get("checkpoint") or _newest_checkpoint(ctx),
        model_uri=registered.get("uri"),
        weights_digest=trained.get("weights_digest"),
        warnings=ctx.warnings,
    )
    if status == "interrupted":
        last_result["signum"] = ctx.stopping.signum
    done = {"done_key": ctx.keys["train"].key} if status == "done" else {}
    ctx.run = ctx.run.model_copy(update={"status": status, "result": dict(last_result), **done})
    unrecorded: Exception | None = None
    try:
        # Before the tracker is waited for: a signal there must not make a finished run look unfinished.
        ctx.ledger.save_run(ctx.run)
    except (OSError, ServiceError) as failure:
        if error is None:
            raise
        unrecorded = failure
    ctx.attempt = ended
    ctx.tracker.set_tags({"penstock.exactness": exactness or "not reached", "penstock.status": status})
    unsent = ctx.tracker.close(TRACKED_STATUS[status])
    if unsent:
        ctx.reporter.warn(f"{unsent} metric points wait for the tracking server; the next penstock run or status sends them")
    try:
        # Last: an attempt that is still marked as running is what a later command repairs.
        if unrecorded is None:
            ctx.ledger.save_attempt(ctx.run.run, ctx.attempt)
    except (OSError, ServiceError) as failure:
        unrecorded = failure
    if unrecorded is not None:
        # A full disk, for instance: what stopped the attempt is the news, not that it cannot be written down.
        ctx.reporter.warn(f"the end of this attempt is not on record ({unrecorded}); the next run or status repairs that")


def _newest_checkpoint(ctx: RunContext) -> str | None:
    """Where the next attempt would go on."""
    try:
        committed = CheckpointStore(ctx.work_storage).committed()
    except (OSError, PenstockError):
        return None  # whatever is wrong there has been said, or will be by the next attempt
    return committed[0].name if committed else None


def _tags(run: Run, attempt: Attempt, keys: dict[str, StageKey], loaded: LoadedSpec) -> dict[str, str]:
    tags = {
        "penstock.run": run.run,
        "penstock.pipeline": run.pipeline,
        "penstock.file": loaded.file.name,
        "penstock.status": "running",
        "prefect.flow_run_id": attempt.prefect_flow_run_id or "",
        **{f"penstock.key.{name}": key.key for name, key in keys.items()},
    }
    commit = git_commit(loaded.base_dir)
    return {**tags, "git.commit": commit} if commit else tags
