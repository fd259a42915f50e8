"""How does training run, from a state to the end? One linear loop, the same on every rank.

Everything a restart needs is in the checkpoint; nothing here remembers anything else. At an epoch's end the state moves to
(epoch + 1, 0), then the epoch is validated, then the state is saved if a checkpoint is due: a run that resumes from that one
does not validate the epoch again.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import Literal

from penstock.errors import DataError, TrainingError
from penstock.ingest.feed.cursor import Feed
from penstock.training.evaluation.metrics import MetricSet
from penstock.training.evaluation.validation import validate
from penstock.training.events import now_ms
from penstock.training.faults import not_a_number
from penstock.training.job import TrainJob
from penstock.training.loop.observer import Observer, StepTimes
from penstock.training.loop.step_sync import Exchange
from penstock.training.own_values import OwnValues, collecting
from penstock.training.ranks import Group
from penstock.training.recipe import Recipe
from penstock.training.state import TrainState
from penstock.training.step.learner import Learner

__all__ = ["LoopEnd", "Parts", "run_loop"]


@dataclass(frozen=True)
class Parts:
    """The objects that the loop uses."""

    job: TrainJob
    group: Group
    recipe: Recipe
    learner: Learner
    feed: Feed
    validation: Feed | None
    metrics: MetricSet
    observer: Observer


@dataclass(frozen=True)
class LoopEnd:
    """How the loop ended; a checkpoint of `state` is being written, unless it was there before."""

    status: Literal["finished", "interrupted"]
    state: TrainState


def run_loop(parts: Parts, state: TrainState) -> LoopEnd:
    """Train from `state` to the end of the spec, or until the observer wants to stop. A collective."""
    callbacks = parts.learner.callbacks
    with collecting(OwnValues(parts.group, "train")) as own:
        try:
            callbacks.call("start")
            parts.learner.check_callbacks()
            end = _run_loop(parts, state, own)
            if end.status == "finished":
                callbacks.call("end")
        except BaseException as error:
            with contextlib.suppress(TrainingError):  # of a callback: the first error is the one to raise
                callbacks.call("failure", error)
            raise
        return end


def _run_loop(parts: Parts, state: TrainState, own: OwnValues) -> LoopEnd:
    spec, feed, learner, observer = parts.job.spec, parts.feed, parts.learner, parts.observer
    callbacks = learner.callbacks
    exchange = Exchange(parts.group, observer.wants, own=own)
    times: list[StepTimes] = []
    began_s = 0.0
    """When the first of these steps began."""
    if callbacks.ended:
        observer.notify(f"nothing to train: ended at step {state.step:,}: {callbacks.ended}")

    while not (callbacks.ended or _finished(parts.job, state)):
        started_at = state
        asked_s = time.perf_counter()
        for batch in feed.batches(state.epoch, state.position):
            got_s = time.perf_counter()
            began_s = began_s if times else asked_s
            learning_rate = learner.learning_rate
            loss = learner.step(batch.columns, batch.rows, batch.global_rows)

            epoch = state.epoch
            state = state.after_batch(batch.position)
            epoch_done = batch.position >= feed.num_rows
            if epoch_done:
                learner.end_epoch()
                state = state.next_epoch()
            callbacks.after_step(state, epoch_done=epoch_done)
            exchange.record(loss, got_s - asked_s)
            times.append(StepTimes(now_ms(), got_s - asked_s, batch.global_rows, learning_rate, epoch))
            asked_s = time.perf_counter()

            last = _finished(parts.job, state)
            planned = epoch_done or _every(spec.validate_every_steps, state.step)
            validate_now = parts.validation is not None and (planned or last)
            # The best checkpoint must not depend on the clock of `every_s`: every validated state is a candidate.
            candidate = validate_now and spec.checkpoint.best is not None
            on_epoch = epoch_done and spec.checkpoint.every_epoch
            save_now = last or candidate or on_epoch or _every(spec.checkpoint.every_steps, state.step)
            if not (exchange.due or validate_now or save_now or callbacks.may_end_alone(parts.group)):
                continue

            decision = exchange.meet(ends=callbacks.wants_end)
            observer.steps(state.step, times, decision, time.perf_counter() - began_s)
            # Every rank has the same losses, and nothing has been saved since the last check.
            _check_finite(state, decision.losses)
            times.clear()
            measured = {"train/loss": decision.losses[-1]}
            if decision.end:
                last, save_now, validate_now = True, True, parts.validation is not None
            if validate_now and parts.validation is not None:
                values = validate(learner, parts.recipe, parts.validation, parts.metrics, parts.group)
                observer.validated(state.step, values)
                measured |= values
                callbacks.call("validation", values)
                if not planned and (candidate or callbacks.has("validation")):
                    observer.add_caveat(f"step {state.step} was validated because training ended there")
            if decision.end or (validate_now and callbacks.agreed_to_end(parts.group)):
                callbacks.end(parts.group)
                observer.notify(f"ends at step {state.step:,}: {callbacks.ended}")
                last, save_now = True, True
            if save_now or decision.save or decision.stop:
                callbacks.call("checkpoint")
                observer.save(state, measured)
            if decision.stop and not last:
                return LoopEnd("interrupted", state)
            if last or epoch_done:
                break
            asked_s = time.perf_counter()
        if state == started_at:  # the next try would give no batch either
            raise DataError(
                f"the train feed gave no batch at row {state.position:,} of {feed.num_rows:,} in epoch {state.epoch}"
            )
    return LoopEnd("finished", state)


def _check_finite(state: TrainState, losses: list[float]) -> None:
    bad = next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if bad is not None:
        raise not_a_number(f"the training loss is {losses[bad]} at step {state.step - len(losses) + 1 + bad:,}")


def _finished(job: TrainJob, state: TrainState) -> bool:
    out_of_steps = job.spec.max_steps is not None and state.step >= job.spec.max_steps
    return out_of_steps or state.epoch >= job.spec.epochs


def _every(steps: int | None, step: int) -> bool:
    return steps is not None and step % steps == 0
