"""How is one trial performed? Its rows are prepared, or shared; then it is trained, in a run of its own.

It is not evaluated: the test split is for the best trial alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from penstock.errors import Interrupted, PenstockError, TrainingError
from penstock.flows.run.close_attempt import close_attempt
from penstock.flows.run.open_attempt import begin_attempt, introduce
from penstock.flows.tune.space import load_trial
from penstock.flows.tune.sweep import Sweep
from penstock.machine.stopping import StopRequest, stop_behind
from penstock.progress import Progress
from penstock.tasks.all_stages import ALL_STAGES
from penstock.tasks.context import RunContext, StageOutcome
from penstock.tasks.project import Project
from penstock.tasks.records.keys import StageKey, stage_keys
from penstock.tasks.records.ledger import Run
from penstock.tasks.stage import VerifyContext, perform
from penstock.tasks.stages import BEFORE_TRAINING
from penstock.tasks.train import STAGE as TRAIN
from penstock.tasks.tune.record import Trial
from penstock.training.checkpoint.journal import read_journal
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.job import TrainOutcome

__all__ = ["perform_trial"]

_PREPARING = [stage for stage in ALL_STAGES if stage.name in BEFORE_TRAINING]


@dataclass
class _TrialReporter:
    """Print the lines and warnings of a trial's training under its number; its end is a line of the driver.

    User code's prints on the workers are among these lines, and kept nowhere else.
    """

    sweep: Sweep
    number: int

    def progress(self, _stage: str) -> Progress:
        return lambda *_: None

    def report(self, text: str) -> None:
        if text.startswith(f"{TRAIN.name}: "):
            self.sweep.line(self.number, f": {text}")

    def warn(self, text: str) -> None:
        self.sweep.line(self.number, f": {text}")

    def finished(self, outcome: StageOutcome) -> None:
        pass


def perform_trial(sweep: Sweep, trial: Trial, stopping: StopRequest) -> Trial:
    """Train a trial to its end, or go on with one that was cut. In any thread of the driver. Returns its record.

    A trial whose values make it fail is `failed`. One that is stopped by the user stays `running`, and continues.

    Raises:
        PenstockError: an error that the trial's values do not cause, such as an unreachable storage.
    """
    loaded = load_trial(sweep.loaded, trial.values)
    reporter = _TrialReporter(sweep, trial.number)
    project = loaded.project
    if loaded.spec.data == sweep.loaded.spec.data:
        project.listing = sweep.ctx.project.listing
    rows = _with_rows(sweep, project, reporter)
    ledger, keys = sweep.ctx.ledger, stage_keys(project, sweep.ctx.ledger.stage_output)
    finished = None if trial.note else _finished_before(sweep, project, keys)  # its own training, decided against at its end
    if finished is not None:
        return sweep.update(trial.number, **_done(sweep, *finished))

    spec = loaded.spec.model_dump(mode="json", by_alias=True, exclude={"tune"})
    run = ledger.load_run(trial.run or "") or ledger.new_run(loaded.spec.name, spec)
    mine = {"run": trial.run, "spec": spec, "origins": loaded.origins, "keys": keys, "status": "running"}
    parent = {"parent": sweep.ctx.tracker.run_id, "penstock.sweep": sweep.ctx.run.run, "penstock.trial": str(trial.number)}
    ctx = begin_attempt(
        ledger,
        run.model_copy(update={**mine, "sweep": sweep.ctx.run.run}),
        keys,
        loaded,
        reporter,
        stopping,
        sweep.ctx.need_ray,
        will_train=True,
        tags=parent,
    )
    ctx.outcomes, ctx.open_feeds = dict(rows.outcomes), rows.open_feeds
    ctx.on_points = partial(sweep.report, trial.number)
    try:
        introduce(ctx)
        if committed := CheckpointStore(ctx.work_storage).committed():  # what was measured before it is not measured again
            ctx.on_points(list(read_journal(ctx.work_storage, committed[0].manifest.step)))
        for stage in _PREPARING:
            stage.publish(ctx, ctx.output(stage.name))
        if not sweep.trials[trial.number - 1].note:  # else it was killed while it was being stopped early
            perform(TRAIN, ctx)
            ledger.note_training(ctx.run)
        if sweep.trials[trial.number - 1].note:  # decided by its last validation
            return _stopped_early(sweep, trial, ctx)
        ended = _done(sweep, ctx.run, ctx.output("train"))
    except Exception as error:
        # Of any class: the trial's records are closed; errors that its values do not cause are raised again there.
        return _ended_otherwise(sweep, trial, ctx, error)
    ctx.tracker.log_metrics({"objective": ended["value"]}, ended["step"])
    close_attempt(ctx, "partial", note=sweep.title(trial))
    return sweep.update(trial.number, **ended)


def _with_rows(sweep: Sweep, project: Project, reporter: _TrialReporter) -> RunContext:
    """Return a context with the outcomes up to `shuffle`; trials with the same rows share one."""
    with sweep.preparing:
        keys = stage_keys(project, sweep.ctx.ledger.stage_output)
        found = sweep.prepared.get(keys["shuffle"].key)
        if found is None:
            found = replace(sweep.ctx, project=project, keys=keys, reporter=reporter, outcomes={}, open_feeds=None)
            for stage in _PREPARING:
                perform(stage, found)
            sweep.prepared[keys["shuffle"].key] = found
    return found


def _finished_before(sweep: Sweep, project: Project, keys: dict[str, StageKey]) -> tuple[Run, dict[str, Any]] | None:
    """Find a run that has trained exactly this to its end, in this sweep or before it, and its outcome."""
    ledger, key = sweep.ctx.ledger, keys["train"].key
    same = ledger.run_with_training(project.spec.name, key)
    record = ledger.stage_record(TRAIN.record_path(same.run, key), key) if same is not None else None
    if same is None or record is None:
        return None
    return (same, record.output) if TRAIN.verify(VerifyContext(project, same.run, deep=False), record.output) is None else None


def _done(sweep: Sweep, run: Run, output: dict[str, Any]) -> dict[str, Any]:
    """Return what the record of a trial says of its end."""
    outcome, metric = TrainOutcome.model_validate(output), sweep.tune.metric
    if (error := sweep.lacks_metric(outcome.metrics)) is not None:
        raise error
    return {
        "state": "done",
        "run": run.run,
        "value": outcome.metrics[metric],
        "step": outcome.model_step,
        "weights_digest": outcome.weights_digest,
    }


def _ended_otherwise(sweep: Sweep, trial: Trial, ctx: RunContext, error: Exception) -> Trial:
    lost = sweep.ctx.stopping.lost
    if lost is not None:  # the records are another process's now
        ctx.tracker.close(None)
        raise lost from error
    if sweep.unmeasured is not None:
        close_attempt(ctx, "failed", sweep.unmeasured)
        raise sweep.unmeasured from error
    stopped = stop_behind(error)
    if isinstance(stopped, Interrupted) and sweep.trials[trial.number - 1].note:
        return _stopped_early(sweep, trial, ctx)
    if isinstance(stopped, Interrupted):
        close_attempt(ctx, "interrupted", stopped)
        return sweep.trials[trial.number - 1]
    close_attempt(ctx, "failed", error, note=f"{sweep.title(trial)} failed")
    if isinstance(error, PenstockError) and error.exit_code in (TrainingError.exit_code, 2, 4):
        return sweep.update(trial.number, state="failed", error=error.message)
    raise error


def _stopped_early(sweep: Sweep, trial: Trial, ctx: RunContext) -> Trial:
    ctx.tracker.set_tags({"penstock.trial.state": "stopped early"})
    close_attempt(ctx, "partial", note=f"{sweep.title(trial)}: {sweep.trials[trial.number - 1].note}")
    return sweep.end_early(trial.number)
