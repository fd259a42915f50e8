"""What does one Ray Train worker do with a user's function? It answers Ray's calls from penstock, and calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from ray.train.v2._internal.execution.train_fn_utils import get_train_fn_utils, set_train_fn_utils

from penstock.errors import PenstockError, TrainingError
from penstock.training.checkpoint.exactness import (
    BIT_EXACT,
    check_identity,
    environment_of,
    environment_of_all,
    judge,
    reporting_nondeterminism,
    with_reason,
)
from penstock.training.checkpoint.fence import Writer
from penstock.training.checkpoint.journal import JournalWriter, truncate_journal
from penstock.training.checkpoint.manifest import CheckpointFacts, CheckpointManifest
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.checkpoint.writer import CheckpointWriter
from penstock.training.determinism import make_deterministic
from penstock.training.events import Resumed
from penstock.training.frameworks.ray_train.folder import folder_digest
from penstock.training.frameworks.ray_train.session import Session, StopAtCheckpoint, at_last_batch
from penstock.training.job import TrainJob
from penstock.training.loop.event_sender import Courier, MailboxClient
from penstock.training.on_ray.worker import RankResult, agree_on_checkpoint
from penstock.training.own_values import OwnValues, collecting
from penstock.training.ranks import Group
from penstock.training.recipe import Recipe
from penstock.training.rng import seed_rng
from penstock.training.state import TrainState

__all__ = ["run_loop_rank", "run_session"]

EMPTY_PASS = (
    "training went on from a checkpoint that was reported inside a pass over the rows, after its last batch, so that the first "
    "pass is empty, and there was no checkpoint before it; if the loop cannot bear that, report it behind the pass, or begin "
    "anew with `penstock run FILE --fresh`"
)


def run_loop_rank(job: TrainJob, group: Group, client: MailboxClient, *, stop: bool = False, restart: int = 0) -> RankResult:
    """Call the user's function as one rank of `group`. A collective; arguments as of on_ray/worker.py's `run_rank`.

    Raises:
        TrainingError: the function fails, or ends without a checkpoint.
    """
    return run_session(job, group, client, lambda session: _call(job), stop=stop, restart=restart)


def run_session(
    job: TrainJob,
    group: Group,
    client: MailboxClient,
    loop: Callable[[Session], None],
    *,
    stop: bool = False,
    restart: int = 0,
    digest: Callable[[Mapping[str, bytes]], str] = folder_digest,
    apart: Collection[str] = (),
    restores_all: bool = False,
) -> RankResult:
    """Run a loop that reports to a session, as one rank of `group`. A collective.

    Args:
        loop: trains; its errors are those of the user's code.
        digest, apart: as of `Session`.
        restores_all: the loop restores everything a checkpoint holds, its place in the rows included, so that a continued run
            may be bit-exact. A user's function never is: what it restores cannot be verified.

    Raises:
        TrainingError: the loop fails, or ends without a checkpoint.
    """
    make_deterministic(job.spec.cpus_per_worker)
    stop = group.from_first(stop)
    store = job_checkpoints(job)
    avoid = None if restores_all else partial(_inside_a_pass, job)
    checkpoint, warnings = agree_on_checkpoint(store, Writer(job.attempt, restart), group, avoid)
    environment = environment_of_all(group.everyones(environment_of(group.device, job.manifest.feed_schema)))
    state, exactness = TrainState(), BIT_EXACT
    if checkpoint is not None:
        check_identity(checkpoint.manifest, job.identity, checkpoint.name)
        state = checkpoint.state
        exactness = judge(checkpoint.manifest, group.world_size, job.settings, environment)
    if not restores_all:
        exactness = with_reason(
            exactness, f"what {job.code.target.rpartition(':')[2]} restores of a checkpoint is its own affair"
        )
    facts = CheckpointFacts.at(
        state,
        world_size=group.world_size,
        identity=job.identity,
        settings=job.settings,
        environment=environment,
        exactness=exactness,
    )
    name = checkpoint.name if checkpoint is not None else None
    result = RankResult("interrupted", state, exactness, state.step if checkpoint is not None else None, name)
    if stop:
        return result
    with ExitStack() as closes:
        courier: Courier | None = None
        writer: CheckpointWriter | None = None
        if group.is_first:
            store.check_not_replaced()
            truncate_journal(job.run_storage, state.step)
            courier = closes.enter_context(closing(Courier(client)))
            writer = closes.enter_context(
                closing(CheckpointWriter(store, JournalWriter(job.run_storage, store.writer), courier.post))
            )
            if checkpoint is not None:
                courier.post(
                    Resumed(step=state.step, checkpoint=checkpoint.name, exactness=exactness, warnings=tuple(warnings))
                )
        own = closes.enter_context(collecting(OwnValues(group, "train")))
        arguments = (job, group, facts, checkpoint, own, courier, writer, digest, apart)
        session = closes.enter_context(closing(Session(*arguments, knows_epochs=restores_all)))
        _answer_with(session, closes)
        closes.enter_context(reporting_nondeterminism(session.nondeterministic_op))
        seed_rng(job.seed)  # weights begin alike on every rank, as in a recipe
        finished = _to_its_end(job, loop, session)
        written = writer.wait() if writer is not None else None
    name = written or name
    if finished and group.from_first(name is None):
        raise TrainingError(
            f"{job.code.target} came to its end and has reported no checkpoint, so there is nothing to keep of it",
            next_step="ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder)), once at least",
        )
    return replace(
        result,
        status="finished" if finished else "interrupted",
        state=session.state,
        exactness=session.exactness if session.state.step > state.step else exactness,
        checkpoint=name,
    )


def _inside_a_pass(job: TrainJob, manifest: CheckpointManifest) -> str | None:
    if not at_last_batch(job, manifest.position):
        return None
    return "was reported inside the loop over the rows, after an epoch's last batch"


def _answer_with(session: Session, closes: ExitStack) -> None:
    """Have Ray Train's functions answered by `session` until `closes` ends."""
    try:
        before = get_train_fn_utils()
    except RuntimeError:  # no worker of Ray Train
        before = None
    set_train_fn_utils(session)
    closes.callback(set_train_fn_utils, before)


def _to_its_end(job: TrainJob, loop: Callable[[Session], None], session: Session) -> bool:
    """True when the loop came to its end, False where it was left for a stop."""
    step = session.state.step
    try:
        with Recipe(loop, job.code.target).blaming("training"):
            loop(session)
    except PenstockError as error:
        if session.first_pass_is_empty and session.state.step == step:
            error.next_step = EMPTY_PASS
        raise
    except StopAtCheckpoint:
        return False
    return True


def _call(job: TrainJob) -> None:
    function = job.code.load()
    if not callable(function):
        raise TrainingError(f"train.loop: {job.code.target} is no function")
    given = [job.code.located(dict(job.spec.params))] if inspect.signature(function).parameters else []
    with Recipe(function, job.code.target).blaming("train_func"):
        function(*given)
