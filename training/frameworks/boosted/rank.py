"""What does one Ray Train worker do to boost trees? It reads its rows, joins the others, goes on from the newest checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from penstock.errors import SpecError
from penstock.ingest.schema import Split
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.training.checkpoint.exactness import (
    BIT_EXACT,
    check_identity,
    environment_of,
    environment_of_all,
    judge,
    with_reason,
)
from penstock.training.checkpoint.fence import Writer
from penstock.training.checkpoint.journal import JournalWriter, truncate_journal
from penstock.training.checkpoint.manifest import Checkpoint, CheckpointFacts
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.checkpoint.writer import CheckpointWriter
from penstock.training.determinism import make_deterministic
from penstock.training.evaluation.metrics import validation_metrics
from penstock.training.events import Resumed
from penstock.training.frameworks.boosted.library import Library, ShardTable, Task
from penstock.training.frameworks.boosted.model import BoostedPredicts
from penstock.training.frameworks.boosted.rounds import BEST_ROUND, PATIENCE, BestRound, FirstRank, Parts, run_rounds
from penstock.training.job import TrainJob
from penstock.training.loop.event_sender import Courier, MailboxClient
from penstock.training.loop.machine_load import MachineSampler
from penstock.training.on_ray.worker import RankResult, agree_on_checkpoint
from penstock.training.open_feeds import open_job_feed
from penstock.training.ranks import Group
from penstock.training.state import TrainState

__all__ = ["rank_of", "run_boosted_rank", "without_patience"]

READ_BYTES = 16 << 20
"""About so many bytes of features are read at once, by each rank."""


def rank_of(library: Library) -> Callable[..., RankResult]:
    """What every worker does with this library."""
    return partial(run_boosted_rank, library)


def without_patience(params: Mapping[str, Any]) -> dict[str, Any]:
    """The library's part of `train.params`."""
    return {name: value for name, value in params.items() if name != PATIENCE}


def run_boosted_rank(
    library: Library, job: TrainJob, group: Group, client: MailboxClient, *, stop: bool = False, restart: int = 0
) -> RankResult:
    """Train as one rank of `group`. A collective.

    Args:
        library: what grows the trees.
        job, group, client, stop, restart: as of `penstock.training.on_ray.worker.run_rank`.

    Raises:
        SpecError: `checkpoint.best` is set, and the validation split holds no rows.
        TrainingError: the user's objective fails, or the library refuses the parameters or the rows.
    """
    make_deterministic(job.spec.cpus_per_worker)
    stop = group.from_first(stop)
    schema, params = job.manifest.feed_schema, without_patience(job.spec.params)
    task = Task(schema, params, job.seed, max(1, int(job.spec.cpus_per_worker)), job.code)
    validates = bool(job.manifest.rows.get("validation"))
    if job.spec.checkpoint.best is not None and not validates:
        raise SpecError(
            f"train.checkpoint.best.metric is {job.spec.checkpoint.best.metric!r}, and the validation split holds no rows",
            next_step="give the data a larger validation split: data.validation",
        )
    train = _shard(job, task, "train", group)
    validation = _shard(job, task, "validation", group) if validates else None
    predicts = BoostedPredicts(own=task.own is not None)
    metrics = validation_metrics(job.spec.checkpoint.best, schema, predicts)

    store = job_checkpoints(job)
    checkpoint, warnings = agree_on_checkpoint(store, Writer(job.attempt, restart), group)
    environment = environment_of_all(group.everyones(environment_of(group.device, schema)))
    state, best_round, facts = group.together(lambda: _continue_from(checkpoint, job, group, library, environment))
    name = checkpoint.name if checkpoint is not None else None
    start = RankResult("interrupted", state, facts.exactness, state.step if name else None, name)
    if stop:
        return start
    content = group.together(lambda: checkpoint.storage.read_bytes(library.file)) if checkpoint is not None else None
    with ExitStack() as closes:
        first: FirstRank | None = None
        if group.is_first:
            store.check_not_replaced()
            truncate_journal(job.run_storage, facts.step)
            courier = closes.enter_context(closing(Courier(client, sampler=MachineSampler())))
            writer = CheckpointWriter(store, JournalWriter(job.run_storage, store.writer), courier.post)
            closes.enter_context(closing(writer))
            first = FirstRank(job, courier, writer, facts, library.file)
            if checkpoint is not None:
                found = tuple(warnings)
                courier.post(Resumed(step=state.step, checkpoint=checkpoint.name, exactness=facts.exactness, warnings=found))
        network = closes.enter_context(library.joined(group, ray.util.get_node_ip_address()))
        trees = library.trees(task, train, validation, content, network)
        parts = Parts(job, group, trees, train, validation, metrics, predicts, first)
        status, end = run_rounds(parts, state, best_round)
        written = writer.wait() if group.is_first else None
    return replace(start, status=status, state=end, checkpoint=written or start.checkpoint)


def _shard(job: TrainJob, task: Task, split: Split, group: Group) -> ShardTable:
    """This rank's rows: as they are stored, for their order means nothing to trees, unless the order draws some of them."""
    row_bytes = 4 * len(task.table.names)
    rows = max(1024, READ_BYTES // row_bytes) * group.world_size
    order = job.order if job.order.is_drawn else make_order(ShuffleSpec(mode="none"), job.manifest.rows["train"])
    spec = job.spec.model_copy(update={"batch_rows": rows, "last_batch": "keep"})
    feed = open_job_feed(replace(job, order=order, spec=spec), split, group.rank, group.world_size, group.device)
    return ShardTable(task.table, feed)


def _continue_from(
    checkpoint: Checkpoint | None, job: TrainJob, group: Group, library: Library, environment: dict[str, str]
) -> tuple[TrainState, BestRound, CheckpointFacts]:
    """Where to go on, and what checkpoints written from here say about themselves.

    Raises:
        ResumeError: the checkpoint is from another training.
    """
    settings = {**job.settings, library.name: library.version}
    state, best_round, exactness = TrainState(), BestRound(), BIT_EXACT
    if checkpoint is not None:
        check_identity(checkpoint.manifest, job.identity, checkpoint.name)
        exactness = judge(checkpoint.manifest, group.world_size, settings, environment)
        reason = library.not_repeatable(job.spec.params)
        exactness = with_reason(exactness, reason) if reason is not None else exactness
        state = checkpoint.state
        best_round = BestRound.model_validate_json(checkpoint.storage.read_bytes(BEST_ROUND))
    facts = CheckpointFacts.at(
        state,
        world_size=group.world_size,
        identity=job.identity,
        settings=settings,
        environment=environment,
        exactness=exactness,
    )
    return state, best_round, facts
