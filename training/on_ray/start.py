"""Where does one rank of an attempt start? At the newest checkpoint that can be trusted, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import PenstockError
from penstock.training.checkpoint.exactness import continue_from, environment_of, environment_of_all, with_reason
from penstock.training.checkpoint.fence import Writer
from penstock.training.checkpoint.journal import truncate_journal
from penstock.training.checkpoint.manifest import Checkpoint, CheckpointFacts, CheckpointManifest
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.checkpoint.writer import CheckpointWriter
from penstock.training.determinism import make_deterministic
from penstock.training.events import Resumed
from penstock.training.job import TrainJob
from penstock.training.loop.event_sender import EventSender, MailboxClient
from penstock.training.ranks import Group
from penstock.training.state import TrainState

__all__ = ["RankResult", "Start", "start_rank"]


@dataclass(frozen=True)
class RankResult:
    """How a worker group ended. `checkpoint` is the newest on rank 0; on the others it is the one they began with."""

    status: Literal["finished", "interrupted"]
    state: TrainState
    exactness: str
    resumed_from_step: int | None
    checkpoint: str | None
    returned: tuple[Any, ...] = ()
    """What a user's function returned on each rank, as JSON has it."""


@dataclass(frozen=True)
class Start:
    """Where one rank of an attempt starts.

    Attributes:
        checkpoint: training continues from it.
        warnings: about skipped checkpoints.
        facts: the same in every checkpoint of this attempt; its state is the start.
        stopped: the driver has asked for a stop before the first step.
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
        """The start of training."""
        return TrainState(self.facts.step, self.facts.epoch, self.facts.position)

    @property
    def result(self) -> RankResult:
        """The result before any step."""
        there = self.checkpoint
        step, name = (self.facts.step, there.name) if there is not None else (None, None)
        return RankResult("interrupted", self.state, self.facts.exactness, step, name)

    def first_rank(self, closes: ExitStack, client: MailboxClient) -> tuple[EventSender, CheckpointWriter]:
        """Open rank 0's sender to the driver and writer of checkpoints until `closes` ends, and report a resume."""
        self.store.check_not_replaced()
        # Segments sealed beyond the checkpoint belong to steps that are now executed again.
        truncate_journal(self.job.run_storage, self.facts.step)
        sender = closes.enter_context(closing(EventSender(client)))
        writer = closes.enter_context(closing(CheckpointWriter(self.store, self.job.run_storage, sender.post)))
        if self.checkpoint is not None:
            name, exactness = self.checkpoint.name, self.facts.exactness
            sender.post(Resumed(step=self.facts.step, checkpoint=name, exactness=exactness, warnings=self.warnings))
        return sender, writer


def start_rank(
    job: TrainJob,
    group: Group,
    *,
    stop: bool,
    restart: int,
    versions: Mapping[str, Any] | None = None,
    caveat: str | None = None,
    caveat_resumed: str | None = None,
    avoid: Callable[[CheckpointManifest], str | None] | None = None,
) -> Start:
    """Agree on the checkpoint to continue from, and on the exactness of the weights. A collective.

    Args:
        stop, restart: as of on_ray/worker.py's `run_rank`.
        versions: settings besides the job's that bits depend on.
        caveat, caveat_resumed: why the bits may differ from an undisturbed run's: always, or after a resume.
        avoid: as of `CheckpointStore.newest_valid`.

    Raises:
        ResumeError: the checkpoint is from another training.
        CheckpointError: no checkpoint can be trusted.
    """
    make_deterministic(job.spec.cpus_per_worker)
    stop = group.from_first(stop)  # the same on all ranks: they would wait for one that left alone
    store = job_checkpoints(job)
    checkpoint, warnings = _agree_on_checkpoint(store, Writer(job.attempt, restart), group, avoid)
    environment = environment_of_all(group.everyones(environment_of(group.device, job.manifest.feed_schema)))
    settings = {**job.settings, **(versions or {})}
    facts = continue_from(checkpoint, job.identity, group.world_size, settings, environment)
    for reason in (caveat, caveat_resumed if checkpoint is not None else None):
        if reason is not None:
            facts = facts.model_copy(update={"exactness": with_reason(facts.exactness, reason)})
    return Start(job, group, store, checkpoint, tuple(warnings), facts, stop)


def _agree_on_checkpoint(
    store: CheckpointStore, writer: Writer, group: Group, avoid: Callable[[CheckpointManifest], str | None] | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """Find the newest checkpoint that can be trusted, on rank 0; the others get its answer, for they may see the storage later.

    Args:
        avoid: as for `CheckpointStore.newest_valid`.
    """

    def find() -> tuple[Checkpoint | None, list[str]] | PenstockError:
        if not group.is_first:
            return None, []
        try:
            store.take_over(writer)
            found = store.newest_valid(avoid)
            store.clean(found[0])
        except PenstockError as error:
            return error
        return found

    found = group.from_first(group.together(find))
    if isinstance(found, PenstockError):
        raise found
    return found
