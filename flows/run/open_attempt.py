"""Before the first stage: choose and check a run, repair what a vanished attempt left, open the records."""

from __future__ import annotations

import contextlib
import getpass
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from prefect.runtime import flow_run

from penstock.errors import LeaseHeldError, ResumeError, ServiceError
from penstock.flows.preflight.checks import Preflight, check_cluster, check_recipe, check_storage
from penstock.flows.preflight.cpus import cpus_needed
from penstock.flows.preflight.try_batch import try_one_batch
from penstock.flows.run.decisions import (
    Continue,
    Refuse,
    avoid_busy_run,
    choose_run,
    decide,
    others_at_work,
    refusal,
    refuse_same_training,
)
from penstock.flows.run.flow_runs import name_flow_run
from penstock.flows.run.repair import close_attempts, repair_run
from penstock.flows.run.request import RunRequest
from penstock.flows.servers.probes import ray_address
from penstock.flows.servers.services import ray_cluster
from penstock.flows.spec_file import GIVEN, LoadedSpec
from penstock.installed import ENVIRONMENT, describe_environment
from penstock.lease import hold_lease
from penstock.machine.prints import passing_prints
from penstock.machine.stopping import StopRequest, stop_behind
from penstock.messages import run_command
from penstock.redact import redact_text
from penstock.tasks.context import Reporter, RunContext
from penstock.tasks.prepare import MATERIALIZE
from penstock.tasks.project import Project
from penstock.tasks.records.changes import changes
from penstock.tasks.records.keys import StageKey, stage_keys
from penstock.tasks.records.ledger import Attempt, Ledger, Run, lease_of, utc_now
from penstock.tasks.stage import VerifyContext
from penstock.tasks.stages import BEFORE_TRAINING
from penstock.tasks.train import STAGE as TRAIN
from penstock.training.checkpoint.journal import read_journal
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.tracking.registry import TRACKERS
from penstock.training.tracking.tracker import Tracker
from penstock.usercode.package import file_content

if TYPE_CHECKING:
    from penstock.flows.servers.ray_local import RayCluster

__all__ = ["RayOnDemand", "begin_attempt", "check_needs", "introduce", "open_attempt", "reconfirm_run"]


def open_attempt(
    request: RunRequest,
    reporter: Reporter,
    stopping: StopRequest,
    need_ray: RayOnDemand,
    held: contextlib.ExitStack,
    before: Run | None = None,
    at_work: Sequence[str] | None = None,
) -> RunContext:
    """Choose the run, check what it needs, and open the records of a new attempt at it. Call it in `choosing_a_run`.

    Args:
        held: takes the lease of the run; close it when the work is over.
        before: run to compare the attempt with; by default the pipeline's newest run.
        at_work: what `choosing_a_run` has yielded.

    Raises:
        LeaseHeldError: another process works on the same training, or on the run to continue.
        PenstockError: the run cannot begin or continue, or cannot succeed.
    """
    preflight = request.preflight()
    loaded, project = preflight.loaded, preflight.project
    ledger = Ledger(project.storage)
    keys = stage_keys(project, ledger.stage_output)
    with passing_prints(lambda line: reporter.report(f"recipe: {line}")):
        check_recipe(project)
    current = _current_run(ledger, loaded.spec.name, request.fresh, reporter)
    if current is None and not project.storage.is_local:
        check_storage(project.storage)
    before = before or current
    run = _chosen_run(ledger, loaded, keys, request, current, reporter, at_work)
    will_train = not _is_trained(ledger, project, run)
    check_needs(ledger, preflight, run, need_ray, will_train=will_train, until=request.until)
    unused = at_work is not None and run.run not in at_work
    held.enter_context(hold_lease(project.storage, lease_of(run), on_lost=stopping.give_up, nested=True, unused=unused))
    if current is not None and current.run == run.run and current.tracker != run.tracker:
        repair_run(ledger, current, loaded.state_dir)  # its former tracker gets the end of the run
    elif current is not None and current.run != run.run and any(attempt.is_open for attempt in ledger.attempts(current.run)):
        with contextlib.suppress(LeaseHeldError), hold_lease(ledger.storage, lease_of(current)):  # no process works on it
            repair_run(ledger, current, loaded.state_dir)
    return begin_attempt(ledger, run, keys, loaded, reporter, stopping, need_ray, will_train=will_train, before=before)


def begin_attempt(
    ledger: Ledger,
    run: Run,
    keys: dict[str, StageKey],
    loaded: LoadedSpec,
    reporter: Reporter,
    stopping: StopRequest,
    need_ray: Callable[[], bool],
    *,
    will_train: bool,
    tags: Mapping[str, str] | None = None,
    before: Run | None = None,
) -> RunContext:
    """Close the records of earlier attempts at `run`, and open those of a new one, compared with `before`."""
    numbers = ledger.attempt_numbers(run.run)
    newest = ledger.newest_attempts(run.run, numbers)
    left = [attempt for attempt in newest if attempt.is_open]
    if left and (known := ledger.load_run(run.run)) is not None:
        close_attempts(ledger, known, left)
    changed = changes(before, run.model_copy(update={"keys": keys})).lines() if before is not None else []
    command = run_command(loaded.file, loaded.overrides)
    attempt = ledger.new_attempt(run.run, flow_run.get_id(), max(numbers, default=0) + 1, changed=changed, command=command)
    for path, content in _given_files(loaded).items():
        ledger.run_storage(run.run).write_bytes(f"code/{path}", content)
    last = next((each for each in newest if each.number == numbers[-1] and each.sent_to is not None), None)
    tracker = _open_tracker(ledger, run, attempt, loaded, tags or {}, recovers=last is None)
    shown = last.stages if last is not None and (last.status, last.sent_to) == ("done", tracker.run_id) else []
    return RunContext(
        project=loaded.project,
        keys=keys,
        ledger=ledger,
        run=run.model_copy(update={"tracking_runs": {**run.tracking_runs, run.tracker: tracker.run_id}}),
        attempt=attempt,
        tracker=tracker,
        reporter=reporter,
        state_dir=loaded.state_dir,
        need_ray=need_ray,
        on_cluster=ray_address() is not None,
        stopping=stopping,
        will_train=will_train,
        before=before,
        shown=frozenset(stage["key"] for stage in shown),
    )


def _given_files(loaded: LoadedSpec) -> dict[str, bytes]:
    """Return what a program gave, with all code that it reaches: the run can then go on where the program is not."""
    files = {path: file_content(path, text) for code in loaded.project.codes for path, text in code.files.items()}
    files[loaded.file.relative_to(loaded.base_dir).as_posix()] = loaded.text.encode()
    return files if any(path.startswith(f"{GIVEN}/") for path in files) else {}


def reconfirm_run(ctx: RunContext, *, fresh: bool) -> bool:
    """Decide again, now that the keys of the prepared rows are known; return whether the attempt stays with its run.

    If so, record the new keys. An attempt with `fresh` always stays.
    """
    keys = stage_keys(ctx.project, ctx.recorded)
    if keys == ctx.keys:
        return True
    decision = Continue(ctx.run) if fresh else decide(ctx.ledger, ctx.run, ctx.run.spec["train"], keys)
    if not isinstance(decision, Continue) or decision.run.run != ctx.run.run:
        if ctx.before is not None and ctx.before.run == ctx.run.run:  # a refusal names what made the rows others
            ctx.run = ctx.run.model_copy(update={"spec": ctx.before.spec, "keys": ctx.before.keys})
        return False
    ctx.keys, ctx.run = keys, ctx.run.model_copy(update={"keys": keys})
    ctx.ledger.save_run(ctx.run)
    ctx.ledger.note_training(ctx.run)
    _show_keys(ctx)
    ctx.will_train = not _is_trained(ctx.ledger, ctx.project, ctx.run)
    return True


def introduce(ctx: RunContext) -> None:
    """Record the tracked run, and send it points and texts it lacks."""
    ctx.ledger.save_run(ctx.run)
    own = ctx.work_storage
    if ctx.will_train:
        step = next((each.manifest.step for each in CheckpointStore(own).committed()), None)
    else:
        record = ctx.ledger.stage_record(TRAIN.record_path(ctx.run.run, ctx.keys["train"].key), ctx.keys["train"].key)
        step = record.output["step"] if record is not None else None
    if step is not None:
        # Points before the checkpoint may not have reached the server; later ones are measured again.
        ctx.tracker.points(read_journal(own, step, after_step=ctx.tracker.complete_step()))
    resolved = {"spec": ctx.run.spec, "origins": ctx.run.origins}
    ctx.tracker.log_text(f"attempt-{ctx.attempt.number}/spec.yaml", yaml.safe_dump(resolved, sort_keys=False))
    ctx.tracker.log_text(f"attempt-{ctx.attempt.number}/{ENVIRONMENT}", describe_environment())
    _show_keys(ctx)
    ctx.reporter.report(f"{ctx.run.pipeline}: run {ctx.run.run}, attempt {ctx.attempt.number}")


def _show_keys(ctx: RunContext) -> None:
    ctx.tracker.log_json("keys.json", {name: key.model_dump(mode="json") for name, key in ctx.keys.items()})


def _current_run(ledger: Ledger, pipeline: str, fresh: bool, reporter: Reporter) -> Run | None:
    """Return the run to continue; with `fresh` an unreadable one only warns."""
    try:
        return ledger.current_run(pipeline)
    except ResumeError as error:
        if not fresh:
            raise
        reporter.warn(error.message)
        return None


def _chosen_run(
    ledger: Ledger,
    loaded: LoadedSpec,
    keys: dict[str, StageKey],
    request: RunRequest,
    current: Run | None,
    reporter: Reporter,
    at_work: Sequence[str] | None,
) -> Run:
    """Choose the run of this attempt, and return its record."""
    spec = loaded.spec.model_dump(mode="json", by_alias=True, exclude={"tune"})
    others = others_at_work(ledger, loaded.spec.name, keys, at_work)
    refuse_same_training(ledger, others)
    # With --fresh the checkpoints are not read: they may be damaged.
    fresh = choose_run(None, spec["train"], keys, fresh=True) if request.fresh else None
    decision = fresh or avoid_busy_run(decide(ledger, current, spec["train"], keys), others)
    if isinstance(decision, Refuse):
        raise refusal(decision, run_command(request.file, request.overrides, "--fresh"))
    if isinstance(decision, Continue):
        for warning in decision.warnings:
            reporter.warn(f"changed since the last attempt: {warning}")
        if current is not None and decision.run.run != current.run:
            reporter.report(f"back to run {decision.run.run}, whose training has the same rows and settings")
        # Unknown keys keep their recorded values until the rows of this attempt are prepared.
        known = {name: key if key.key else decision.run.keys.get(name, key) for name, key in keys.items()}
        going_on = {"spec": spec, "origins": loaded.origins, "keys": known, "status": "running", "sweep": None}
        return decision.run.model_copy(update=going_on)
    if current is not None:
        reporter.report(f"a new run: {decision.reason}")
    return ledger.new_run(loaded.spec.name, spec, current).model_copy(update={"origins": loaded.origins, "keys": keys})


def _is_trained(ledger: Ledger, project: Project, run: Run) -> bool:
    """Return whether training is finished, as far as its key is known."""
    key = run.keys["train"].key
    record = ledger.stage_record(TRAIN.record_path(run.run, key), key)
    return record is not None and TRAIN.verify(VerifyContext(project, run.run, deep=True), record.output) is None


def check_needs(
    ledger: Ledger, preflight: Preflight, run: Run, need_ray: RayOnDemand, *, will_train: bool, until: str | None = None
) -> None:
    """Compare the work that is left with the machine or cluster, and report warnings.

    Raises:
        PreflightError: the run cannot succeed.
    """
    project, warnings, on_cluster = preflight.project, list[str](), ray_address() is not None
    key = run.keys["materialize"].key
    prepares = ledger.stage_record(MATERIALIZE.record_path(run.run, key), key) is None
    if prepares:
        warnings += preflight.resources
    # A run that stops before it may prepare rows on a machine without the training's GPUs.
    trains = will_train and until not in BEFORE_TRAINING
    if on_cluster and (trains or (prepares and until != "read")):
        need_ray.reads_sources = prepares or project.spec.materialize.cache != "disk"
        need_ray()
    elif trains:
        _ = preflight.machine
    if will_train and not CheckpointStore(ledger.run_storage(run.run)).committed():
        if on_cluster:
            need_ray()
        tried = try_one_batch(project, on_cluster=on_cluster, for_sweep=run.sweep is not None, report=need_ray.reporter.report)
        warnings += tried["warnings"]
    for warning in warnings:
        need_ray.reporter.warn(warning)


def _open_tracker(
    ledger: Ledger, run: Run, attempt: Attempt, loaded: LoadedSpec, tags: Mapping[str, str], *, recovers: bool
) -> Tracker:
    """Record the beginning of the attempt here, in Prefect and at the tracker; if that fails, record its end."""
    tracking = TRACKERS.get(run.tracker)
    try:
        ledger.save_run(run)
        if run.sweep is None:
            ledger.make_current(run)
        if run.sweep in (None, run.run):
            name_flow_run(f"{run.run} attempt {attempt.number}", [run.pipeline, run.run])
        return tracking.open(
            tracking.default_uri(loaded.state_dir),
            experiment=run.pipeline,
            run_name=run.run,
            run_id=run.tracking_runs.get(run.tracker),
            tags={**_tags(run, attempt, loaded), **tags},
            params=run.spec,
            attempt=attempt.number,
            outbox=ledger.run_storage(run.run),
            recovers=recovers,
        )
    except BaseException as error:
        stopped = stop_behind(error)
        if isinstance(stopped, LeaseHeldError):  # the records are another process's now
            raise
        status = "interrupted" if stopped is not None else "failed"
        ended = {"status": status, "ended": utc_now(), "error": redact_text(str(error))}
        with contextlib.suppress(OSError, ServiceError):  # the first error is raised
            ledger.save_attempt(run.run, attempt.model_copy(update=ended))
            ledger.save_run(run.model_copy(update={"status": status}))
        raise


def _tags(run: Run, attempt: Attempt, loaded: LoadedSpec) -> dict[str, str]:
    tags = {
        "penstock.run": run.run,
        "penstock.pipeline": run.pipeline,
        "penstock.file": loaded.file.name,
        "penstock.status": "running",
        "source": f"{loaded.file.parent.name}/{loaded.file.name}",
        "prefect.flow_run_id": attempt.prefect_flow_run_id or "",
    }
    if commit := git_commit(loaded.base_dir):
        tags["git.commit"] = commit
    with contextlib.suppress(KeyError, OSError):  # an account without a name
        tags["user"] = getpass.getuser()
    return tags


@dataclass
class RayOnDemand:
    """Starts or joins the Ray cluster on the first call; `stack` ends it. Returns whether it is this process's own.

    Attributes:
        reads_sources: nodes of a joined cluster will read source files, so they must see them.
    """

    loaded: LoadedSpec
    reporter: Reporter
    stopping: StopRequest
    stack: contextlib.ExitStack
    reads_sources: bool = True
    cluster: RayCluster | None = None
    checked: bool = False

    def __call__(self) -> bool:
        """Start or join the cluster, and check it once."""
        if self.cluster is None:
            self.reporter.report("  connecting to Ray")
            min_cpus = cpus_needed(self.loaded.spec)
            self.cluster = self.stack.enter_context(ray_cluster(self.loaded.state_dir, min_cpus=min_cpus))
            # Ray may swallow a signal while it starts.
            self.stopping.check()
        if not self.checked:
            check_cluster(self.loaded.project, self.cluster, reads_sources=self.reads_sources)
            self.checked = True
        return self.cluster.embedded


def git_commit(directory: Path) -> str | None:
    """Return the commit of `directory`, with `+changes` if tracked files differ; None outside a repository."""
    try:
        commit = _git(directory, "rev-parse", "HEAD")
        changed = _git(directory, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+changes" if changed else commit


def _git(directory: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(directory), *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
