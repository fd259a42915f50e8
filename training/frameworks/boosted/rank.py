"""How does one rank boost trees? It reads its rows, joins the others and continues from the newest checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import ray

from penstock.errors import SpecError
from penstock.ingest.schema import Split
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.messages import counted, shorten
from penstock.training.checkpoint.manifest import Checkpoint
from penstock.training.checkpoint.start_from import START
from penstock.training.evaluation.metrics import validation_metrics
from penstock.training.frameworks.boosted.library import Forest, Library, ShardTable, Task
from penstock.training.frameworks.boosted.model import BoostedPredicts
from penstock.training.frameworks.boosted.rounds import BEST_ROUND, PATIENCE, BestRound, FirstRank, Parts, run_rounds
from penstock.training.job import TrainJob
from penstock.training.loop.event_sender import MailboxClient
from penstock.training.on_ray.worker import RankResult
from penstock.training.open_feeds import open_job_feed
from penstock.training.ranks import Group
from penstock.training.session.attempt import start_rank

__all__ = ["run_boosted_rank", "without_patience"]

READ_BYTES = 16 << 20
"""Bytes of features in a batch of one rank, about."""


def without_patience(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the library's part of `train.params`."""
    return {name: value for name, value in params.items() if name != PATIENCE}


def run_boosted_rank(
    library: Library, job: TrainJob, group: Group, client: MailboxClient, *, stop: bool = False, restart: int = 0
) -> RankResult:
    """Train as one rank of `group`. A collective.

    Args:
        library: what grows the trees.
        job, group, client, stop, restart: as of `penstock.training.on_ray.worker.run_rank`.

    Raises:
        SpecError: a split holds fewer rows than there are workers, or `checkpoint.best` is set and nothing validates.
        TrainingError: the library refuses the parameters or the rows.
    """
    start = start_rank(
        job,
        group,
        stop=stop,
        restart=restart,
        versions={library.name: library.version},
        caveat_resumed=library.not_repeatable(job.spec.params),
    )
    if start.stopped:
        return start.result
    schema, params = job.manifest.feed_schema, without_patience(job.spec.params)
    task = Task(schema, params, job.seed, max(1, int(job.spec.cpus_per_worker)))
    validates = bool(job.manifest.rows.get("validation"))
    if job.spec.checkpoint.best is not None and not validates:
        raise SpecError(
            f"train.checkpoint.best.metric is {job.spec.checkpoint.best.metric!r}, and the validation split holds no rows",
            next_step="give the data a larger validation split: data.validation",
        )
    for split in ("train", "validation"):
        if 0 < (rows := job.manifest.rows.get(split, 0)) < group.world_size:
            raise SpecError(
                f"the {split} split holds {counted(rows, 'row')}, and each of {group.world_size} workers needs one",
                next_step=f"set train.workers to {rows}, or give the data more {split} rows",
            )
    train = _shard(job, task, "train", group)
    validation = _shard(job, task, "validation", group) if validates else None
    metrics = validation_metrics(job.spec.checkpoint.best, schema, BoostedPredicts())
    begun = group.together(lambda: _begun(job, library, task))
    content, best_round = group.together(lambda: _read(job, start.checkpoint, library))
    before = begun.rounds if begun is not None else 0
    with ExitStack() as closes:
        facts = start.facts
        first = FirstRank(job, *start.first_rank(closes, client), facts, library.file, before) if group.is_first else None
        network = closes.enter_context(library.joined(group, ray.util.get_node_ip_address()))
        trees = library.trees(task, train, validation, content, network)
        if begun is not None and (now := library.forest(trees.content(before)).objective) != begun.objective:
            raise _unfit(job, f"were grown for {begun.objective[0]}, not for {now[0]}")
        parts = Parts(job, group, trees, train, validation, metrics, first, before)
        status, end = run_rounds(parts, start.state, best_round)
        written = first.finish() if first is not None else None
    return replace(start.result, status=status, state=end, checkpoint=written or start.result.checkpoint)


def _begun(job: TrainJob, library: Library, task: Task) -> Forest | None:
    """Read the trees of `train.start_from`. Raises SpecError if they do not fit the rows."""
    if job.spec.start_from is None:
        return None
    with library.reraising():
        forest = library.forest(job.run_storage.read_bytes(START))
    names = [name.replace(" ", "_") for name in task.table.names]
    if [name.replace(" ", "_") for name in forest.names] != names:
        raise _unfit(job, f"split at {shorten(forest.names)}, and the rows have {shorten(task.table.names)}")
    classes = task.schema.num_classes or 2
    if forest.objective[1] != (1 if classes == 2 else classes):
        raise _unfit(job, f"are {forest.objective[1]} a round, and the label has another number of classes")
    return forest


def _unfit(job: TrainJob, reason: str) -> SpecError:
    problem = f"train.start_from: the trees of {job.spec.start_from} {reason}"
    return SpecError(problem, next_step="take it out, or correct preprocess and params")


def _read(job: TrainJob, checkpoint: Checkpoint | None, library: Library) -> tuple[bytes | None, BestRound]:
    """Read the trees, and the best round so far."""
    if checkpoint is None:
        return job.run_storage.read_bytes(START) if job.spec.start_from is not None else None, BestRound()
    files = checkpoint.storage
    return files.read_bytes(library.file), BestRound.model_validate_json(files.read_bytes(BEST_ROUND))


def _shard(job: TrainJob, task: Task, split: Split, group: Group) -> ShardTable:
    """Open this rank's rows as they are stored, or as drawn; trees do not depend on the order."""
    row_bytes = 4 * len(task.table.names)
    rows = max(1024, READ_BYTES // row_bytes) * group.world_size
    order = job.order if job.order.is_drawn else make_order(ShuffleSpec(mode="none"), job.manifest.rows["train"])
    spec = job.spec.model_copy(update={"batch_rows": rows, "last_batch": "keep"})
    feed = open_job_feed(replace(job, order=order, spec=spec), split, group.rank, group.world_size, group.device)
    return ShardTable(task.table, feed)
