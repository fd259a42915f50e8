"""What does one training worker do? It sets up, continues from the newest checkpoint, and runs the loop to the end."""

from __future__ import annotations

import logging
import os
import socket
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import torch
import torch.distributed as dist

from penstock.errors import PenstockError, PreflightError, SpecError
from penstock.machine.prints import is_worth_a_line
from penstock.redact import first_line, hiding_secrets
from penstock.storage import Storage
from penstock.training.callbacks.callback import Training, load_callbacks
from penstock.training.checkpoint.exactness import reporting_nondeterminism
from penstock.training.checkpoint.matching import load_matching, start_weights
from penstock.training.checkpoint.state_files import training_of, weights_of
from penstock.training.determinism import in_deterministic_mode, make_deterministic
from penstock.training.evaluation.metrics import validation_metrics
from penstock.training.events import Failure
from penstock.training.faults import device_error
from penstock.training.job import TrainJob
from penstock.training.loop.event_sender import MailboxClient, sending_prints_and_fetches
from penstock.training.loop.loop import Parts, run_loop
from penstock.training.loop.observer import FirstRank, Observer
from penstock.training.on_ray.mailbox import MailboxHandle, RayMailboxClient
from penstock.training.on_ray.stacks import answer_with_stacks
from penstock.training.on_ray.start import RankResult, Start, start_rank
from penstock.training.open_feeds import open_job_feed
from penstock.training.ranks import Group
from penstock.training.recipe import load_recipe
from penstock.training.rng import restore_rng, seed_rng
from penstock.training.step.hyperparameters import OPTIMIZER, format_changes
from penstock.training.step.learner import Learner

__all__ = [
    "AgainError",
    "RankResult",
    "check_storage_probe",
    "run_rank",
    "train_alone",
    "train_loop_per_worker",
    "write_storage_probe",
]

_PROBE = "seen-by-all.json"


def train_loop_per_worker(config: dict[str, Any]) -> RankResult:
    """Entry point of Ray Train on every rank.

    Args:
        config: `job` (TrainJob), `mailbox` (MailboxHandle), `work` (None is `run_rank`).
    """
    import ray.train.torch  # it imports pandas and Ray Data, which a lone rank does not need

    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):  # Ray Train's, which writes any library's information
            handler.addFilter(is_worth_a_line)
    group = Group.current(ray.train.torch.get_device())
    actor = ray.get_runtime_context().current_actor
    return _as_rank(config["job"], group, config["mailbox"], actor, config["work"] or run_rank)


class AgainError(Exception):
    """A lone rank failed with an exception that may pass: Ray starts the task again, as Ray Train would."""


def train_alone(job: TrainJob, mailbox: MailboxHandle, work: Callable[..., RankResult] | None) -> RankResult:
    """Entry point of a Ray task that is the only rank, on CPUs. Ray runs it again if its process dies.

    Raises:
        PenstockError: as the work raised it, unless it may pass.
        AgainError: for any other exception.
    """
    ray.get(mailbox.call("starting"))
    # As in a worker of Ray Train: a recipe may use its rank, or sum over all ranks.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return _as_rank(job, Group(0, 1, torch.device("cpu")), mailbox, None, work or run_rank)
    except Exception as error:  # a restart may help, and `train.retries` bounds them
        if isinstance(error, PenstockError) and not error.transient:
            raise
        raise AgainError(f"{type(error).__name__}: {first_line(error)}") from error
    finally:
        if dist.is_initialized():  # else the recipe has ended it
            dist.destroy_process_group()


def _as_rank(job: TrainJob, group: Group, mailbox: MailboxHandle, actor: Any, work: Callable[..., RankResult]) -> RankResult:
    """Register at the mailbox, train, and report an error to the driver. `actor` is None in a task."""
    answer_with_stacks()
    node = ray.get_runtime_context().get_node_id()
    registered = ray.get(mailbox.call("start", group.rank, socket.gethostname(), os.getpid(), actor, node))
    if actor is None and registered["restart"]:
        mailbox.call("lost", [group.rank])  # else Ray Train's controller reports it
    client = RayMailboxClient(mailbox, registered["restart"])
    try:
        with hiding_secrets(), sending_prints_and_fetches(RayMailboxClient(mailbox, registered["restart"]), group.rank):
            check_storage_probe(job.run_storage, job.attempt)
            return work(job, group, client, stop=registered["stop"], restart=registered["restart"])
    except BaseException as error:
        final = device_error(error, "")
        client.put([_failure(group.rank, final or error)])
        if final is not None:
            raise final from error
        raise


def write_storage_probe(run_storage: Storage, attempt: int) -> None:
    """Write a file that every rank must be able to read. Runs in the driver."""
    run_storage.write_json(_PROBE, {"attempt": attempt})


def check_storage_probe(run_storage: Storage, attempt: int) -> None:
    """Read the driver's file in a rank: a node that joined late was not checked by the preflight.

    Raises:
        PreflightError: it is not there: checkpoints written here would be lost, and those of others not found.
    """
    try:
        found = run_storage.read_json(_PROBE)["attempt"]
    except FileNotFoundError:
        found = None
    if found != attempt:
        raise PreflightError(
            f"{socket.gethostname()}, a node that joined the Ray cluster after its nodes were checked, does not see "
            f"{run_storage.uri('')}, the storage of this run",
            next_step="set `storage` to s3:// or to a folder that every node mounts under the same path; or take that node out "
            "(`ray stop` there), and run the same command: it continues",
        )


def run_rank(job: TrainJob, group: Group, client: MailboxClient, *, stop: bool = False, restart: int = 0) -> RankResult:
    """Train as one rank of `group`. A collective.

    Args:
        job: the training.
        group: the ranks.
        client: delivers rank 0's events to the driver.
        stop: a stop was requested before this worker started.
        restart: number of worker groups of this attempt before this one.
    """
    make_deterministic(job.spec.cpus_per_worker)
    feed = open_job_feed(job, "train", group.rank, group.world_size, group.device)
    validation = None
    if job.manifest.rows.get("validation"):
        validation = open_job_feed(job, "validation", group.rank, group.world_size, group.device)
    # Weights start the same on every rank and for every number of ranks; later draws differ per rank.
    seed_rng(job.seed)
    recipe = load_recipe(job.code, job.spec.params)
    if recipe.has("augment"):
        feed.augment_with(in_deterministic_mode(partial(recipe.augment, packed=feed.schema.packed)), job.seed)
    callbacks = load_callbacks(job.callbacks)
    learner = Learner(recipe, recipe.build_model(feed.schema), job.spec, group, feed.schema.packed, callbacks)
    metrics = validation_metrics(job.spec.checkpoint.best, feed.schema, recipe).to(group.device)
    check_best_is_validated(job, validation is not None)
    seed_rng(job.seed, group.rank)

    start = start_rank(job, group, stop=stop, restart=restart, versions={OPTIMIZER: learner.hyperparameters})
    changes = group.together(lambda: _restore(start, learner))
    start, state = replace(start, warnings=(*start.warnings, *changes)), start.state
    begun_with = ""
    if start.checkpoint is None and job.spec.start_from is not None:
        begun_with = load_matching(learner.model, start_weights(job.run_storage), job.spec.start_from)
    seen = Training(
        learner.model,
        learner.made_optimizer,
        group.rank,
        group.world_size,
        group.device,
        validation is not None,
        job.run_storage,
        state.step,
        state.epoch,
    )
    callbacks.begin(seen)
    if start.stopped:
        return start.result

    with ExitStack() as closes:
        observer = Observer(group)
        if group.is_first:
            observer = FirstRank(job, group, *start.first_rank(closes, client), learner, start.facts)
        if begun_with:
            observer.notify(begun_with)

        def report(operation: str) -> None:
            if learner.model.training:  # validation changes no weight
                observer.nondeterministic_op(operation)

        with reporting_nondeterminism(report):
            end = run_loop(Parts(job, group, recipe, learner, feed, validation, metrics, observer), state)
        written = observer.finish()
    result = start.result
    exactness = observer.exactness or result.exactness
    return replace(result, status=end.status, state=end.state, exactness=exactness, checkpoint=written or result.checkpoint)


def _restore(start: Start, learner: Learner) -> list[str]:
    """Restore the learner and this rank's random generators from the checkpoint, if there is one.

    Returns:
        A warning of changed optimizer settings, if any.

    Raises:
        ResumeError: the checkpoint does not fit.
    """
    checkpoint, group = start.checkpoint, start.group
    if checkpoint is None:
        return []
    training, then = training_of(checkpoint.storage), checkpoint.manifest.settings
    same = then == {**start.job.settings, OPTIMIZER: learner.hyperparameters}
    changed = learner.restore(weights_of(checkpoint.storage), training, checkpoint.state, then[OPTIMIZER], same_settings=same)
    if checkpoint.manifest.world_size == group.world_size:
        restore_rng(training["ranks"][group.rank], group.device)
    changes = ", ".join(format_changes(changed, then[OPTIMIZER], learner.hyperparameters))
    return [f"from step {checkpoint.state.step:,} on the optimizer has new settings: {changes}"] if changed else []


def check_best_is_validated(job: TrainJob, validates: bool) -> None:
    """Raise SpecError if the best checkpoint is to be kept and nothing validates."""
    best = job.spec.checkpoint.best
    if best is not None and not validates:
        raise SpecError(
            f"train.checkpoint.best.metric is {best.metric!r}, and the validation split holds no rows",
            next_step="give the data a larger validation split: data.validation",
        )


def _failure(rank: int, error: BaseException) -> Failure:
    final = isinstance(error, PenstockError) and not error.transient
    text = "".join(traceback.format_exception(error)[-12:])
    return Failure(rank=rank, final=final, text=text, error=error if isinstance(error, PenstockError) else None)
