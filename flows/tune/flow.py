"""The flow of a sweep: rows once, trials side by side, then the best spec as a file, run to its end.

`tune` is what Prefect runs. Trials are its tasks; the run of the best spec, which evaluates and registers, is its subflow.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from prefect import State, flow
from prefect.states import Cancelled, Completed
from prefect.utilities.annotations import quote
from pydantic import BaseModel, Field

from penstock.digest import digest_of
from penstock.errors import Interrupted, PenstockError, TrainingError
from penstock.flows.pipeline import pipeline
from penstock.flows.preflight.checks import Preflight, check_storage, machine_cpus
from penstock.flows.run.close_attempt import close_attempt
from penstock.flows.run.flow_runs import FlowEndedOffline, flow_result, name_at_begin, remember_end
from penstock.flows.run.open_attempt import RayOnDemand, begin_attempt, check_needs, introduce
from penstock.flows.run.reporter import make_reporter
from penstock.flows.run.request import RunRequest
from penstock.flows.servers.services import prepare_environment
from penstock.flows.spec_file import LoadedSpec, load_spec, with_values
from penstock.flows.tune.driver import perform_trials, trials_at_once
from penstock.flows.tune.space import check_space, tune_spec
from penstock.flows.tune.summary import best_of, describe_trials, short
from penstock.flows.tune.sweep import Sweep
from penstock.lease import hold_lease
from penstock.machine.stopping import StopRequest, stop_behind, stopping_on_signals
from penstock.messages import counted
from penstock.redact import hiding_secrets
from penstock.tasks.all_stages import ALL_STAGES
from penstock.tasks.context import Reporter, RunContext
from penstock.tasks.project import Project
from penstock.tasks.records.at_work import choosing_a_run
from penstock.tasks.records.keys import StageKey, stage_keys
from penstock.tasks.records.ledger import Ledger, sweep_lease_path
from penstock.tasks.stage import stage_task
from penstock.tasks.stages import BEFORE_TRAINING
from penstock.tasks.tune.record import SweepRecord, Trial, current_sweep, save_sweep
from penstock.tasks.tune.spec import TuneSpec

__all__ = ["TuneRequest", "tune"]


class TuneRequest(BaseModel):
    """Which sweep to make, or to continue."""

    file: str = Field(description="Path of the pipeline file.")
    overrides: list[str] = Field(default_factory=list, description="Changes of single values, such as `tune.trials=20`.")
    fresh: bool = Field(default=False, description="Start a new sweep instead of continuing the last one.")


@flow(name="penstock-tune", flow_run_name=name_at_begin, persist_result=False)
def tune(request: TuneRequest) -> State[Any]:
    """Make or continue the sweep that `request.file` describes. The result is the data of the state."""
    prepare_environment()
    reporter = make_reporter()
    loaded = load_spec(request.file, request.overrides)
    tune_section = tune_spec(loaded)
    check_space(loaded)
    project = loaded.project
    stopping = StopRequest()
    with contextlib.ExitStack() as stack:
        stack.enter_context(hiding_secrets())
        stack.enter_context(stopping_on_signals(stopping))
        check_storage(project.storage)
        stack.enter_context(hold_lease(project.storage, sweep_lease_path(loaded.spec.name), on_lost=stopping.give_up))
        ray_stack = stack.enter_context(contextlib.ExitStack())
        need_ray = RayOnDemand(loaded, reporter, stopping, ray_stack)
        with choosing_a_run(project.storage, loaded.spec.name, stopping.give_up):
            ctx = _open_sweep(request, loaded, project, reporter, stopping, need_ray)
        try:
            trials = _trials(ctx, loaded, tune_section, need_ray)
            result = _keep_best(ctx, loaded, tune_section, trials, ray_stack)
        except BaseException as error:
            if stopping.lost is not None:  # the records are another process's now
                ctx.tracker.close(None)
                raise stopping.lost from error
            stopped = stop_behind(error)
            if isinstance(stopped, Interrupted):
                return Cancelled(message=stopped.message, data=close_attempt(ctx, "interrupted", stopped))
            failed = close_attempt(ctx, "failed", error)
            if isinstance(error, PenstockError):
                error.result = error.result or failed
            raise
        ended = close_attempt(ctx, "done", note=result.pop("summary"))
        data = {**result, "url": ended["url"], "warnings": ended["warnings"]}
        state: State[Any] = Completed(message=f"sweep {ctx.run.run}", data=data)
        if ctx.attempt.prefect_missed_end:
            raise FlowEndedOffline(state)
        return remember_end(state)


def _open_sweep(
    request: TuneRequest,
    loaded: LoadedSpec,
    project: Project,
    reporter: Reporter,
    stopping: StopRequest,
    need_ray: RayOnDemand,
) -> RunContext:
    """Choose the sweep to continue, or begin one, and open the records of an attempt at its own run."""
    ledger, section = Ledger(project.storage), tune_spec(loaded)
    keys = stage_keys(project, ledger.stage_output)
    record, identity = current_sweep(project.storage, loaded.spec.name), _identity(section, keys)
    run = ledger.load_run(record.sweep) if record is not None else None
    spec = loaded.spec.model_dump(mode="json", by_alias=True)
    if record is None or run is None or request.fresh or record.identity != identity:
        if record is not None and not request.fresh:
            reporter.report("a new sweep: the pipeline, its data or the space is not that of the last one")
        run = ledger.new_run(loaded.spec.name, spec)
        run = run.model_copy(update={"run": f"{run.run}-sweep"})
        save_sweep(project.storage, loaded.spec.name, SweepRecord(sweep=run.run, identity=identity))
    going_on = {"spec": spec, "origins": loaded.origins, "keys": keys, "status": "running", "sweep": run.run}
    run = run.model_copy(update=going_on)
    check_needs(ledger, Preflight(loaded), run, need_ray, will_train=True)
    tags = {"penstock.sweep": run.run}
    return begin_attempt(ledger, run, keys, loaded, reporter, stopping, need_ray, will_train=True, tags=tags)


def _identity(section: TuneSpec, keys: dict[str, StageKey]) -> str:
    """Digest what all trials share; their number, and how many run at once, may change."""
    shared = section.model_dump(mode="json", exclude={"trials", "time_s", "concurrent"})
    inputs = {
        name: {each: value for each, value in keys[name].inputs.items() if not each.startswith("rows.")}
        for name in (*BEFORE_TRAINING, "train")
    }
    return digest_of([shared, inputs])


def _trials(ctx: RunContext, loaded: LoadedSpec, section: TuneSpec, need_ray: RayOnDemand) -> list[Trial]:
    """Prepare the rows once, and perform all trials."""
    introduce(ctx)
    for stage in ALL_STAGES:
        ctx.stopping.check()
        if stage.name in BEFORE_TRAINING:
            stage_task(stage)(quote(ctx), return_state=True).result(raise_on_failure=True, _sync=True)  # type: ignore[call-overload]
    sweep = Sweep(loaded, section, ctx)
    sweep.prepared[ctx.keys["shuffle"].key] = ctx
    if sweep.has_work:
        need_ray()
        perform_trials(sweep, _concurrent(sweep, need_ray))
    return sweep.trials


def _keep_best(
    ctx: RunContext, loaded: LoadedSpec, section: TuneSpec, trials: list[Trial], ray_stack: contextlib.ExitStack
) -> dict[str, Any]:
    """Write and run the spec of the best. Returns what `penstock tune --json` prints, and a `summary`."""
    best = best_of(section.mode, trials)
    if best is None:
        raise TrainingError(
            "no trial came to its end",
            problems=[f"trial {trial.number}: {trial.error or trial.note or trial.state}" for trial in trials],
            next_step="change tune.space, or give the sweep more time (tune.time_s)",
        )
    # Beside the pipeline file, because relative paths in it start there.
    file = loaded.file.with_name(f"{loaded.file.stem}.best{loaded.file.suffix}")
    values = ", ".join(f"{key}: {short(value)}" for key, value in best.values.items())
    head = (
        f"# The best of sweep {ctx.run.run} of {loaded.file.name}: trial {best.number}, {section.metric} {short(best.value)},\n"
    )
    head += f"# with {values}. It is trained already: `penstock run {file.name}` finds it.\n"
    file.write_text(head + with_values(loaded, best.values), encoding="utf-8")
    ctx.tracker.log_json("trials.json", [trial.model_dump(mode="json") for trial in trials])
    ctx.tracker.log_text(file.name, file.read_text(encoding="utf-8"))
    ctx.tracker.log_metrics({section.metric: best.value or 0.0}, 0)
    ctx.tracker.set_tags({"penstock.best": best.run or ""})
    summary = describe_trials(section.metric, trials, best)
    ctx.reporter.report(f"{summary}; {file.name} holds its spec")
    ray_stack.close()
    registered = _run_best(ctx, file, best)
    return {
        "status": "done",
        "sweep": ctx.run.run,
        f"{ctx.run.tracker}_run_id": ctx.tracker.run_id,
        "trials": [trial.model_dump(mode="json", exclude={"reports"}) for trial in trials],
        "best": {"trial": best.number, "values": best.values, section.metric: best.value, "run": best.run},
        "file": str(file),
        "metrics": registered["metrics"],
        "model_uri": registered["model_uri"],
        "weights_digest": registered["weights_digest"],
        "stages": registered["stages"],
        "summary": summary,
    }


def _concurrent(sweep: Sweep, need_ray: RayOnDemand) -> int:
    """Decide how many trials run at once, and print it."""
    assert need_ray.cluster is not None
    spec = sweep.loaded.spec
    nodes, most = need_ray.cluster.nodes, need_ray.cluster.most
    if need_ray.cluster.embedded:  # it may have been given more CPUs than there are, for the tasks that prepare rows
        nodes, most = ({"CPU": machine_cpus(), "GPU": float(torch.cuda.device_count())},), None
    concurrent, lines = trials_at_once(spec, sweep.tune, nodes, most)
    for line in (*lines, f"{counted(sweep.tune.limit, 'trial')}, {concurrent} at once"):
        sweep.ctx.reporter.report(f"{spec.name}: {line}")
    sweep.shared_lines.update(lines)
    return concurrent


def _run_best(ctx: RunContext, file: Path, best: Trial) -> dict[str, Any]:
    """Run the best spec to its end: training is found, the test split measured, the model registered."""
    run = ctx.ledger.load_run(best.run or "")
    assert run is not None
    with choosing_a_run(ctx.storage, run.pipeline, ctx.stopping.give_up):
        if run.sweep is not None:  # from now on it is the pipeline's own
            run = run.model_copy(update={"sweep": None})
            ctx.ledger.save_run(run)
        ctx.ledger.make_current(run)
    return flow_result(lambda: pipeline(RunRequest(file=str(file)), return_state=True))
