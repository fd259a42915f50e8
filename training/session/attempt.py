"""How does one rank run an attempt of a loop that penstock did not write: where does it start, and what does it return?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
from penstock.training.checkpoint.manifest import Checkpoint, CheckpointFacts, CheckpointManifest
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.checkpoint.writer import CheckpointWriter
from penstock.training.determinism import make_deterministic
from penstock.training.events import Resumed
from penstock.training.job import TrainJob
from penstock.training.loop.event_sender import Courier, MailboxClient
from penstock.training.loop.machine_load import MachineSampler
from penstock.training.on_ray.worker import RankResult, agree_on_checkpoint
from penstock.training.own_values import OwnValues, collecting
from penstock.training.ranks import Group
from penstock.training.recipe import Recipe
from penstock.training.rng import seed_rng
from penstock.training.session.folder import folder_digest
from penstock.training.session.session import Session, StopAtCheckpoint, at_last_batch
from penstock.training.state import TrainState

__all__ = ["Start", "run_session", "start_rank"]

EMPTY_PASS = (
    "training continued from a checkpoint that was reported inside a pass over the rows, after its last batch, so that the "
    "first pass is empty, and there was no checkpoint before it; if the loop cannot handle that, report it behind the pass, or "
    "start over with `penstock run FILE --fresh`"
)


@dataclass(frozen=True)
class Start:
    """Where one rank of an attempt starts.

    Attributes:
        checkpoint: the one that training continues from.
        warnings: about checkpoints that were passed over.
        facts: what is the same in every checkpoint of this attempt; its state is where training starts.
        stopped: the driver wants no step.
    """

    job: TrainJob
    group: Group
    store: CheckpointStore
    checkpoint: Checkpoint | None
    warnings: tuple[str, ...]
    facts: CheckpointFacts
    stopped: bool

    @property
    def state(self) -> TrainState:
        """Where training starts."""
        return TrainState(self.facts.step, self.facts.epoch, self.facts.position)

    @property
    def result(self) -> RankResult:
        """The result before any step."""
        there = self.checkpoint
        step, name = (self.facts.step, there.name) if there is not None else (None, None)
        return RankResult("interrupted", self.state, self.facts.exactness, step, name)

    def first_rank(self, closes: ExitStack, client: MailboxClient) -> tuple[Courier, CheckpointWriter]:
        """On rank 0, open the ways to the driver and to the checkpoints until `closes` ends, and report a resume."""
        self.store.check_not_replaced()
        truncate_journal(self.job.run_storage, self.facts.step)
        courier = closes.enter_context(closing(Courier(client, sampler=MachineSampler())))
        journal = JournalWriter(self.job.run_storage, self.store.writer)
        writer = closes.enter_context(closing(CheckpointWriter(self.store, journal, courier.post)))
        if self.checkpoint is not None:
            name, exactness = self.checkpoint.name, self.facts.exactness
            courier.post(Resumed(step=self.facts.step, checkpoint=name, exactness=exactness, warnings=self.warnings))
        return courier, writer


def start_rank(
    job: TrainJob,
    group: Group,
    *,
    stop: bool,
    restart: int,
    versions: Mapping[str, Any] | None = None,
    doubt: str | None = None,
    doubt_resumed: str | None = None,
    avoid: Callable[[CheckpointManifest], str | None] | None = None,
) -> Start:
    """Agree on the checkpoint to continue from, and on what can be claimed of the weights. A collective.

    Args:
        stop, restart: as of on_ray/worker.py's `run_rank`.
        versions: settings besides the job's that bits depend on.
        doubt, doubt_resumed: why the bits may differ from an undisturbed run's: always, or once training is continued.
        avoid: as of `CheckpointStore.newest_valid`.

    Raises:
        ResumeError: the checkpoint is from another training.
        CheckpointError: none can be trusted.
    """
    make_deterministic(job.spec.cpus_per_worker)
    stop = group.from_first(stop)
    store = job_checkpoints(job)
    checkpoint, warnings = agree_on_checkpoint(store, Writer(job.attempt, restart), group, avoid)
    environment = environment_of_all(group.everyones(environment_of(group.device, job.manifest.feed_schema)))
    settings = {**job.settings, **(versions or {})}
    state, exactness = TrainState(), BIT_EXACT
    if checkpoint is not None:
        check_identity(checkpoint.manifest, job.identity, checkpoint.name)
        state = checkpoint.state
        exactness = judge(checkpoint.manifest, group.world_size, settings, environment)
    for reason in (doubt, doubt_resumed if checkpoint is not None else None):
        exactness = exactness if reason is None else with_reason(exactness, reason)
    facts = CheckpointFacts.at(
        state,
        world_size=group.world_size,
        identity=job.identity,
        settings=settings,
        environment=environment,
        exactness=exactness,
    )
    return Start(job, group, store, checkpoint, tuple(warnings), facts, stop)


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
    function = job.code.target.rpartition(":")[2]
    start = start_rank(
        job,
        group,
        stop=stop,
        restart=restart,
        doubt=None if restores_all else f"what {function} restores of a checkpoint is its own affair",
        avoid=None if restores_all else partial(_inside_a_pass, job),
    )
    if start.stopped:
        return start.result
    with ExitStack() as closes:
        courier, writer = start.first_rank(closes, client) if group.is_first else (None, None)
        own = closes.enter_context(collecting(OwnValues(group, "train")))
        arguments = (job, group, start.facts, start.checkpoint, own, courier, writer, digest, apart)
        session = closes.enter_context(closing(Session(*arguments, knows_epochs=restores_all)))
        _answer_with(session, closes)
        closes.enter_context(reporting_nondeterminism(session.nondeterministic_op))
        seed_rng(job.seed)  # weights begin alike on every rank, as in a recipe
        finished = _to_its_end(job, loop, session)
        written = writer.wait() if writer is not None else None
    name = written or start.result.checkpoint
    if finished and group.from_first(name is None):
        raise TrainingError(
            f"{job.code.target} came to its end and has reported no checkpoint, so there is nothing to keep of it",
            next_step="ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder)), once at least",
        )
    return replace(
        start.result,
        status="finished" if finished else "interrupted",
        state=session.state,
        exactness=session.exactness if session.state.step > start.state.step else start.facts.exactness,
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
    except RuntimeError:  # not a worker of Ray Train
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
