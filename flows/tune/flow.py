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

from penstock.digest import digest_of
from penstock.errors import Interrupted, PenstockError, TrainingError
from penstock.flows.pipeline import pipeline
from penstock.flows.preflight.checks import check_storage, machine_cpus
from penstock.flows.run.close_attempt import close_attempt
from penstock.flows.run.flow_runs import FlowEndedOffline, flow_result, name_at_begin, remember_end
from penstock.flows.run.open_attempt import RayOnDemand, begin_attempt, check_needs, introduce
from penstock.flows.run.reporter import ConsoleReporter
from penstock.flows.run.request import RunRequest
from penstock.flows.servers.services import prepare_environment
from penstock.flows.spec_file import with_values
from penstock.flows.tune.driver import perform_trials, trials_at_once
from penstock.flows.tune.space import tune_spec
from penstock.flows.tune.summary import best_of, describe_trials, short
from penstock.flows.tune.sweep import Sweep
from penstock.lease import hold_lease
from penstock.machine.stopping import StopRequest, stop_behind, stopping_on_signals
from penstock.messages import counted
from penstock.redact import hiding_secrets
from penstock.tasks.all_stages import ALL_STAGES
from penstock.tasks.context import Reporter, RunContext
from penstock.tasks.records.at_work import choosing_a_run
from penstock.tasks.records.keys import StageKey, stage_keys
from penstock.tasks.records.ledger import Ledger, sweep_lease_path
from penstock.tasks.stage import stage_task
from penstock.tasks.stages import BEFORE_TRAINING
from penstock.tasks.tune.record import Trial, current_sweep, make_current_sweep

__all__ = ["tune"]


@flow(name="penstock-tune", flow_run_name=name_at_begin, persist_result=False)
def tune(request: RunRequest) -> State[Any]:
    """Make or continue the sweep that `request.file` describes. The result is the data of the state."""
    prepare_environment()
    reporter, preflight = ConsoleReporter(), request.preflight()
    loaded, project, stopping = preflight.loaded, preflight.project, StopRequest()
    with contextlib.ExitStack() as stack:
        stack.enter_context(hiding_secrets())
        stack.enter_context(stopping_on_signals(stopping))
        check_storage(project.storage)
        stack.enter_context(hold_lease(project.storage, sweep_lease_path(loaded.spec.name), on_lost=stopping.give_up))
        ray_stack = stack.enter_context(contextlib.ExitStack())
        need_ray = RayOnDemand(loaded, reporter, stopping, ray_stack)
        with choosing_a_run(project.storage, loaded.spec.name, stopping.give_up):
            ctx = _open_sweep(request, reporter, stopping, need_ray)
        try:
            sweep = Sweep(loaded, tune_spec(loaded), ctx)
            _perform(sweep, need_ray)
            ray_stack.close()
            result = _keep_best(sweep)
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


def _open_sweep(request: RunRequest, reporter: Reporter, stopping: StopRequest, need_ray: RayOnDemand) -> RunContext:
    """Choose the sweep to continue, or begin one, and open the records of an attempt at its own run."""
    preflight = request.preflight()
    loaded, project = preflight.loaded, preflight.project
    ledger = Ledger(project.storage)
    keys = stage_keys(project, ledger.stage_output)
    spec = loaded.spec.model_dump(mode="json", by_alias=True)
    last = current_sweep(project.storage, loaded.spec.name)
    run = ledger.load_run(last) if last is not None else None
    if run is None or request.fresh or _shared(run.spec, run.keys) != _shared(spec, keys):
        if run is not None and not request.fresh:
            reporter.report("a new sweep: the pipeline, its data or the space is not that of the last one")
        run = ledger.new_run(loaded.spec.name, spec)
        run = run.model_copy(update={"run": f"{run.run}-sweep"})
        make_current_sweep(project.storage, loaded.spec.name, run.run)
    going_on = {"spec": spec, "origins": loaded.origins, "keys": keys, "status": "running", "sweep": run.run}
    run = run.model_copy(update=going_on)
    check_needs(ledger, preflight, run, need_ray, will_train=True)
    tags = {"penstock.sweep": run.run}
    return begin_attempt(ledger, run, keys, loaded, reporter, stopping, need_ray, will_train=True, tags=tags)


def _shared(spec: dict[str, Any], keys: dict[str, StageKey]) -> str:
    """Digest what all trials of a sweep share; their number, and how many run at once, may change."""
    section = {name: value for name, value in spec["tune"].items() if name not in ("trials", "time_s", "concurrent")}
    inputs = {
        name: {each: value for each, value in keys[name].inputs.items() if not each.startswith("rows.")}
        for name in (*BEFORE_TRAINING, "train")
    }
    return digest_of([section, inputs])


def _perform(sweep: Sweep, need_ray: RayOnDemand) -> None:
    """Prepare the rows once, and perform all trials."""
    ctx = sweep.ctx
    introduce(ctx)
    for stage in ALL_STAGES:
        ctx.stopping.check()
        if stage.name in BEFORE_TRAINING:
            stage_task(stage)(quote(ctx), return_state=True).result(raise_on_failure=True, _sync=True)  # type: ignore[call-overload]
    sweep.prepared[ctx.keys["shuffle"].key] = ctx
    if sweep.has_work:
        need_ray()
        perform_trials(sweep, _concurrent(sweep, need_ray))


def _keep_best(sweep: Sweep) -> dict[str, Any]:
    """Write and run the spec of the best. Returns what `penstock tune --json` prints, and a `summary`."""
    ctx, loaded, metric, trials = sweep.ctx, sweep.loaded, sweep.tune.metric, sweep.trials
    best = best_of(sweep.tune.mode, trials)
    if best is None:
        raise TrainingError(
            "no trial came to its end",
            problems=[f"trial {trial.number}: {trial.error or trial.note or trial.state}" for trial in trials],
            next_step="change tune.space, or give the sweep more time (tune.time_s)",
        )
    # Beside the pipeline file, because relative paths in it start there.
    file = loaded.file.with_name(f"{loaded.file.stem}.best{loaded.file.suffix}")
    values = ", ".join(f"{key}: {short(value)}" for key, value in best.values.items())
    text = (
        f"# The best of sweep {ctx.run.run} of {loaded.file.name}: trial {best.number}, {metric} {short(best.value)},\n"
        f"# with {values}. It is trained already: `penstock run {file.name}` finds it.\n"
        f"{with_values(loaded, best.values)}"
    )
    file.write_text(text, encoding="utf-8")
    ctx.tracker.log_text(file.name, text)
    ctx.tracker.log_metrics({metric: best.value or 0.0}, 0)
    ctx.tracker.set_tags({"penstock.best": best.run or ""})
    summary = describe_trials(metric, trials, best)
    ctx.reporter.report(f"{summary}; {file.name} holds its spec")
    registered = _run_best(ctx, file, best)
    return {
        "status": "done",
        "sweep": ctx.run.run,
        f"{ctx.run.tracker}_run_id": ctx.tracker.run_id,
        "trials": [trial.model_dump(mode="json", exclude={"reports"}) for trial in trials],
        "best": {"trial": best.number, "values": best.values, metric: best.value, "run": best.run},
        "file": str(file),
        **{name: registered[name] for name in ("metrics", "model_uri", "weights_digest", "stages")},
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
