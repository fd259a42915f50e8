"""Which trials run next, how many at once, and when is the sweep over?"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Mapping, Sequence
from typing import Any

from prefect import State, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Cancelled, Completed, Failed
from prefect.utilities.annotations import quote

from penstock.flows.preflight.cpus import need_of_worker
from penstock.flows.tune.summary import short
from penstock.flows.tune.sweep import Sweep
from penstock.flows.tune.trial import perform_trial
from penstock.machine.stopping import StopRequest
from penstock.messages import counted
from penstock.tasks.spec import PipelineSpec
from penstock.tasks.tune.record import Trial
from penstock.tasks.tune.spec import TuneSpec
from penstock.training.on_ray.resources import gpus_of_auto, room_for

__all__ = ["perform_trials", "trials_at_once"]

_LOOK_EVERY_S = 0.3

_Ends = queue.SimpleQueue[tuple[int, BaseException | None]]
"""Numbers of trials that have ended, and the error of one that ends the sweep."""


@task(name="trial", task_run_name="trial {number}", cache_policy=NO_CACHE, persist_result=False)
def _trial_task(sweep: Sweep, number: int, ends: _Ends) -> State[Any]:
    try:
        trial = perform_trial(sweep, sweep.trials[number - 1], sweep.live[number])
    except BaseException as error:
        ends.put((number, error))
        raise
    ends.put((number, None))
    if trial.state == "running":
        return Cancelled(message="stopped; it continues with the next command")
    if trial.state == "failed":
        return Failed(message=trial.error)
    return Completed(name="Stopped early" if trial.state == "stopped" else "Completed", message=sweep.describe(trial))


def perform_trials(sweep: Sweep, concurrent: int) -> None:
    """Perform the trials that are left, so many at once, in the driver's main thread.

    Raises:
        Interrupted: a stop was requested; trials that were training have saved.
        PenstockError: an error that no trial's values cause.
    """
    stopping, begun_s, ends = sweep.ctx.stopping, time.monotonic(), _Ends()
    failure: BaseException | None = None
    waiting = [trial for trial in sweep.trials if trial.state == "running"]
    for trial in sweep.trials:
        if trial.state != "running":
            sweep.line(trial.number, f" is {trial.state} already: {sweep.describe(trial)}")
    stopping.graceful = True
    try:
        while True:
            in_time = sweep.tune.time_s is None or time.monotonic() - begun_s < sweep.tune.time_s
            while len(sweep.live) < concurrent and failure is None and not stopping.stop.is_set() and (waiting or in_time):
                verb, following = ("continues", waiting.pop(0)) if waiting else ("begins", sweep.begin())
                if following is None:
                    break
                _submit(sweep, following, verb, ends)
            if not sweep.live:
                break
            with contextlib.suppress(queue.Empty):
                number, error = ends.get(timeout=_LOOK_EVERY_S)
                del sweep.live[number]
                failure = failure or error
                if error is None:
                    trial = sweep.trials[number - 1]
                    sweep.line(number, f" {trial.state}: {sweep.describe(trial)}")
            if failure is not None or stopping.stop.is_set():
                for each in sweep.live.values():
                    each.stop.set()
            if stopping.lost is not None:
                raise stopping.lost
    finally:
        stopping.graceful = False
    if failure is not None:
        raise failure
    stopping.check()


def _submit(sweep: Sweep, trial: Trial, verb: str, ends: _Ends) -> None:
    sweep.live[trial.number] = StopRequest()
    sweep.live[trial.number].graceful = True
    sweep.line(trial.number, f" {verb}: {', '.join(f'{key}={short(value)}' for key, value in trial.values.items())}")
    _trial_task.submit(quote(sweep), trial.number, quote(ends))  # type: ignore[call-overload]  # Prefect passes on what is quoted


def trials_at_once(
    spec: PipelineSpec, tune: TuneSpec, nodes: Sequence[Mapping[str, float]], most: Mapping[str, float] | None = None
) -> tuple[int, list[str]]:
    """Return how many trials run at once on these nodes, so that none waits for CPUs that another holds, and lines about it.

    The lines are about `gpus: auto`, and a number below the one that the file asks for.

    Args:
        most: what the nodes together can grow to, if that is known; trials do not wait for it.
    """
    need, lines = need_of_worker(spec), list[str]()
    if spec.train.gpus == "auto":
        need["GPU"], why, _ = gpus_of_auto(spec.train.workers, spec.train.cpus_per_worker, nodes, most)
        lines.append(why)
    fit = max(1, room_for(need, nodes) // spec.train.workers)
    if spec.materialize.cache == "none":  # the tasks of its streams need CPUs beside those of the workers
        fit = 1
    wanted = min(tune.concurrent or fit, tune.limit)
    if wanted <= fit:
        return wanted, lines
    return fit, [*lines, f"{counted(fit, 'trial')} at once instead of {wanted}, which the nodes cannot hold"]
