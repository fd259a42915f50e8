"""What is done for one trial? Its rows are prepared, or shared; then it is trained, in a run of its own.

It is not evaluated: the test split is for the best trial alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.errors import Interrupted, PenstockError, TrainingError
from penstock.flows.run.close_attempt import close_attempt
from penstock.flows.run.open_attempt import begin_attempt, introduce
from penstock.flows.run.repair import close_attempts, tell_tracker
from penstock.flows.spec_file import LoadedSpec
from penstock.flows.tune.space import load_trial
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
from penstock.tasks.tune.spec import TuneSpec
from penstock.training.checkpoint.journal import read_journal
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.events import Point
from penstock.training.job import TrainOutcome

__all__ = ["Hears", "Sweep", "close_stopped", "perform_trial"]

_EARLY = {"penstock.trial.state": "stopped early"}

_PREPARING = [stage for stage in ALL_STAGES if stage.name in BEFORE_TRAINING]


@dataclass
class Hears:
    """What the sweep hears of a trial while it is performed; called in the trial's thread."""

    report: Callable[[int, int, float], None]
    """(trial, step, value of the metric)."""
    progress: Callable[[int, float, float | None], None]
    """(trial, steps done, steps in all)."""
    line: Callable[[str], None]
    """What a person is to read."""


@dataclass
class Sweep:
    """What all trials of a sweep share.

    Attributes:
        ctx: the attempt at the sweep's own run, whose rows most trials take.
        prepared: the key of a `shuffle` -> a context with the outcomes up to it.
        why_stopped: the reason of a trial that was ended early, by all it has reported; None for another.
        said: what the training of each trial would say, and has been said for all of them.
    """

    loaded: LoadedSpec
    tune: TuneSpec
    ctx: RunContext
    hears: Hears
    why_stopped: Callable[[int], str | None]
    prepared: dict[str, RunContext] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)
    preparing: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class _TrialReporter:
    """Passes on the steps of a trial, and under its number what its training says and warns of; the rest is a line at its end.

    User code's prints on the workers are among what training says, and kept nowhere else.
    """

    number: int
    hears: Hears
    said: set[str]

    def progress(self, stage: str) -> Progress:
        def tell(done: float, total: float | None, unit: str, note: str = "") -> None:
            if stage == TRAIN.name:
                self.hears.progress(self.number, done, total)

        return tell

    def say(self, text: str) -> None:
        of_training = f"{TRAIN.name}: "
        if text.startswith(of_training) and text.removeprefix(of_training) not in self.said:
            self.hears.line(f"trial {self.number}: {text}")

    def warn(self, text: str) -> None:
        self.hears.line(f"trial {self.number}: {text}")

    def finished(self, outcome: StageOutcome) -> None:
        pass


def perform_trial(sweep: Sweep, trial: Trial, stopping: StopRequest) -> Trial:
    """Train a trial to its end, or go on with one that was cut. In any thread of the driver. Returns its record.

    A trial whose values make it fail is `failed`. One that is stopped by the user stays `running`, and continues.

    Raises:
        PenstockError: what is no fault of the trial, such as a storage that is away.
    """
    loaded = load_trial(sweep.loaded, trial.values)
    reporter = _TrialReporter(trial.number, sweep.hears, sweep.said)
    project = Project(loaded.spec, loaded.base_dir, loaded.origins)
    if loaded.spec.data == sweep.loaded.spec.data:
        project.listing = sweep.ctx.project.listing
    rows = _with_rows(sweep, project, reporter)
    ledger, keys = sweep.ctx.ledger, stage_keys(project, sweep.ctx.ledger.stage_output)
    finished = _finished_before(sweep, project, keys)
    if finished is not None:
        return _done(sweep.tune, trial, *finished)

    spec = loaded.spec.model_dump(mode="json", by_alias=True, exclude={"tune"})
    run = ledger.load_run(trial.run or "") or ledger.new_run(loaded.spec.name, spec)
    mine = {"run": trial.run, "spec": spec, "origins": loaded.origins, "keys": keys, "status": "running"}
    parent = {"parent": sweep.ctx.tracker.run_id, "penstock.sweep": sweep.ctx.run.run, "penstock.trial": str(trial.number)}
    ctx = begin_attempt(
        ledger,
        run.model_copy(update={**mine, "sweep": sweep.ctx.run.run}),
        keys,
        loaded,
        project,
        reporter,
        stopping,
        sweep.ctx.need_ray,
        will_train=True,
        tags=parent,
    )
    ctx.outcomes, ctx.open_feeds = dict(rows.outcomes), rows.open_feeds
    ctx.on_points = _reporting(sweep, trial)
    try:
        introduce(ctx)
        if committed := CheckpointStore(ctx.work_storage).committed():  # what was measured before it is not measured again
            ctx.on_points(list(read_journal(ctx.work_storage, committed[0].manifest.step)))
        for stage in _PREPARING:
            stage.publish(ctx, ctx.output(stage.name))
        perform(TRAIN, ctx)
        ended = _done(sweep.tune, trial, ctx.run, ctx.output("train"))
    except Exception as error:
        # Whatever it is: the records of the trial are closed; what is no fault of its values is raised again there.
        return _ended_otherwise(sweep, trial, ctx, error)
    ledger.note_training(ctx.run)
    if why := sweep.why_stopped(trial.number):  # told at its last validation
        return _stopped_early(sweep, trial, ctx, why)
    ctx.tracker.log_metrics({"objective": ended.value or 0.0}, ended.step or 0)
    close_attempt(ctx, "partial", note=_title(sweep, trial))
    return ended.model_copy(update={"tracked_run": ctx.tracker.run_id})


def _with_rows(sweep: Sweep, project: Project, reporter: _TrialReporter) -> RunContext:
    """A context with the outcomes up to `shuffle`; trials with the same rows share one."""
    with sweep.preparing:  # two that need the same rows must not prepare them twice
        keys = stage_keys(project, sweep.ctx.ledger.stage_output)
        found = sweep.prepared.get(keys["shuffle"].key)
        if found is None:
            found = replace(sweep.ctx, project=project, keys=keys, reporter=reporter, outcomes={}, open_feeds=None)
            for stage in _PREPARING:
                perform(stage, found)
            sweep.prepared[keys["shuffle"].key] = found
    return found


def _finished_before(sweep: Sweep, project: Project, keys: dict[str, StageKey]) -> tuple[Run, dict[str, Any]] | None:
    """A run that has trained exactly this to its end, in this sweep or before it, and what came of it."""
    ledger, key = sweep.ctx.ledger, keys["train"].key
    same = ledger.run_with_training(project.spec.name, key)
    record = ledger.stage_record(TRAIN.record_path(same.run, key), key) if same is not None else None
    if same is None or record is None:
        return None
    return (same, record.output) if TRAIN.verify(VerifyContext(project, same.run, deep=False), record.output) is None else None


def _done(tune: TuneSpec, trial: Trial, run: Run, output: dict[str, Any]) -> Trial:
    outcome = TrainOutcome.model_validate(output)
    if tune.metric not in outcome.metrics:
        raise TrainingError(
            f"tune.metric {tune.metric!r} is not among the metrics of the trained model: {', '.join(sorted(outcome.metrics))}",
            next_step="set tune.metric to one of them whose name starts with val/",
        )
    ended: dict[str, Any] = {"state": "done", "run": run.run, "tracked_run": run.tracking_runs.get(run.tracker)}
    ended |= {"value": outcome.metrics[tune.metric], "step": outcome.model_step, "weights_digest": outcome.weights_digest}
    return trial.model_copy(update={**ended, "metrics": outcome.metrics})


def _ended_otherwise(sweep: Sweep, trial: Trial, ctx: RunContext, error: Exception) -> Trial:
    if ctx.stopping.lost is not None:  # the records are another process's now
        ctx.tracker.close(None)
        raise ctx.stopping.lost from error
    stopped = stop_behind(error)
    tracked = {"tracked_run": ctx.tracker.run_id}
    if isinstance(stopped, Interrupted) and (why := sweep.why_stopped(trial.number)):
        return _stopped_early(sweep, trial, ctx, why)
    if isinstance(stopped, Interrupted):
        close_attempt(ctx, "interrupted", stopped)
        return trial.model_copy(update=tracked)
    close_attempt(ctx, "failed", error, note=f"{_title(sweep, trial)} failed")
    if isinstance(error, PenstockError) and error.exit_code in (TrainingError.exit_code, 2, 4):
        return trial.model_copy(update={"state": "failed", "error": error.message, **tracked})
    raise error


def close_stopped(sweep: Sweep, trial: Trial) -> Trial:
    """Of a trial that was killed when it was to end early: its records say so, as if it had ended. Returns its record."""
    ledger, run = sweep.ctx.ledger, sweep.ctx.ledger.load_run(trial.run or "")
    if run is None:
        return trial
    close_attempts(ledger, run)
    run = run.model_copy(update={"status": "partial"})
    ledger.save_run(run)
    tell_tracker(ledger, run, sweep.ctx.state_dir, {**_EARLY, "description": f"{_title(sweep, trial)}: {trial.note}"})
    return trial.model_copy(update={"tracked_run": run.tracking_runs.get(run.tracker)})


def _stopped_early(sweep: Sweep, trial: Trial, ctx: RunContext, why: str) -> Trial:
    ctx.tracker.set_tags(_EARLY)
    close_attempt(ctx, "partial", note=f"{_title(sweep, trial)}: {why}")
    return trial.model_copy(update={"state": "stopped", "note": why, "tracked_run": ctx.tracker.run_id})


def _reporting(sweep: Sweep, trial: Trial) -> Callable[[Sequence[Point]], None]:
    """Pass values of the metric on; those that were heard before the trial was cut are measured again, and are no news."""
    heard = trial.reports[-1].step if trial.reports else 0

    def hear(points: Sequence[Point]) -> None:
        nonlocal heard
        for point in points:
            value = point.values.get(sweep.tune.metric)
            if value is not None and point.step > heard:
                heard = point.step
                sweep.hears.report(trial.number, point.step, value)

    return hear


def _title(sweep: Sweep, trial: Trial) -> str:
    values = ", ".join(f"{key} {value}" for key, value in trial.values.items())
    return f"Trial {trial.number} of sweep {sweep.ctx.run.run} ({values})"
