"""How does one rank run an attempt of a loop that penstock did not write?"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils, get_train_fn_utils, set_train_fn_utils

from penstock.errors import PenstockError, TrainingError
from penstock.training.checkpoint.exactness import reporting_nondeterminism
from penstock.training.checkpoint.folder import folder_digest
from penstock.training.checkpoint.manifest import CheckpointManifest
from penstock.training.events import Notice
from penstock.training.job import TrainJob
from penstock.training.loop.event_sender import MailboxClient
from penstock.training.on_ray.start import RankResult, start_rank
from penstock.training.own_values import OwnValues, collecting
from penstock.training.ranks import Group
from penstock.training.recipe import Recipe
from penstock.training.rng import seed_rng
from penstock.training.session.reported import as_json
from penstock.training.session.session import Session, StopAtCheckpoint, at_last_batch

__all__ = ["run_session"]

EMPTY_PASS = (
    "the checkpoint was reported inside a pass over the rows, after its last batch, so the first pass is empty, and there "
    "is no checkpoint before it: report after the pass, or start over with `penstock run FILE --fresh`"
)


def run_session(
    job: TrainJob,
    group: Group,
    client: MailboxClient,
    loop: Callable[[Session], Any],
    *,
    stop: bool = False,
    restart: int = 0,
    digest: Callable[[Mapping[str, str]], str] = folder_digest,
    separate: Collection[str] = (),
    restores_all: bool = False,
) -> RankResult:
    """Run a loop that reports to a session, as one rank of `group`. A collective.

    Args:
        loop: trains; its errors are the user's.
        digest, separate: as of `Session`.
        restores_all: the loop restores all state of a checkpoint, so that a continued run may be bit-exact. A user's function
            never is: the state that it restores cannot be verified.

    Raises:
        TrainingError: the loop fails, or ends without a checkpoint.
    """
    function = job.code.target.rpartition(":")[2]
    start = start_rank(
        job,
        group,
        stop=stop,
        restart=restart,
        caveat=None if restores_all else f"the state that {function} restores is not verified",
        avoid=None if restores_all else partial(_inside_a_pass, job),
    )
    if start.stopped:
        return start.result
    with ExitStack() as closes:
        sender, writer = start.first_rank(closes, client) if group.is_first else (None, None)
        own = closes.enter_context(collecting(OwnValues(group, "train")))
        session = closes.enter_context(closing(Session(start, own, sender, writer, digest, separate, restores_all)))
        _install(session, group, closes)
        closes.enter_context(reporting_nondeterminism(session.nondeterministic_op))
        seed_rng(job.seed)  # equal weights on every rank, as in a recipe
        if session.ended_before and sender is not None:
            sender.post(Notice(message=f"nothing to train: early_stopping ended it at step {start.state.step:,}"))
        finished, returned = (True, []) if session.ended_before else _run_to_end(job, loop, session)
        written = writer.wait() if writer is not None else None
    name = written or start.result.checkpoint
    if finished and group.from_first(name is None):
        raise TrainingError(
            f"{job.code.target} ended without a reported checkpoint, so there is nothing to keep",
            next_step="call ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))",
        )
    return replace(
        start.result,
        status="finished" if finished else "interrupted",
        state=session.state,
        exactness=session.exactness if session.state.step > start.state.step else start.facts.exactness,
        checkpoint=name,
        returned=tuple(json.loads(each) for each in returned),
    )


def _inside_a_pass(job: TrainJob, manifest: CheckpointManifest) -> str | None:
    if not at_last_batch(job, manifest.position):
        return None
    return "was reported inside the loop over the rows, after an epoch's last batch"


def _install(session: Session, group: Group, closes: ExitStack) -> None:
    """Make `session` the target of Ray Train's functions until `closes` ends."""
    try:
        before = get_train_fn_utils()
    except RuntimeError:  # not a worker of Ray Train: its functions work as in Ray's local mode
        before = None
        local = LocalTrainFnUtils("penstock", world_size=group.world_size, world_rank=group.rank)
        for name in ("get_context", "is_distributed", "barrier", "broadcast_from_rank_zero", "get_preemption_info"):
            setattr(session, name, getattr(local, name))
    set_train_fn_utils(session)
    closes.callback(set_train_fn_utils, before)


def _run_to_end(job: TrainJob, loop: Callable[[Session], Any], session: Session) -> tuple[bool, list[str]]:
    """Run the loop; return False if it was left for a stop, and what it returned on each rank, as JSON."""
    step = session.state.step
    try:
        with Recipe(loop, job.code.target).reraise_as_user_error("training"):
            returned, why = as_json(loop(session))
        if why:
            print(f"what {job.code.target} returned {why}: its repr is kept")  # the driver shows it with the rank
        return True, session.ended(returned)
    except PenstockError as error:
        if session.first_pass_is_empty and session.state.step == step:
            error.next_step = EMPTY_PASS
        raise
    except StopAtCheckpoint as stopped:
        return stopped.finished, []
