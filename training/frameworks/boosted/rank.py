"""How does one rank boost trees? It reads its rows, joins the others and continues from the newest checkpoint."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import replace

import ray

from penstock.errors import SpecError
from penstock.ingest.schema import Split
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.messages import counted, shorten
from penstock.training.checkpoint.manifest import Checkpoint
from penstock.training.checkpoint.start_from import START
from penstock.training.evaluation.metrics import validation_metrics
from penstock.training.frameworks.boosted.library import PATIENCE, Library
from penstock.training.frameworks.boosted.model import BoostedPredicts, Forest
from penstock.training.frameworks.boosted.rounds import BEST_ROUND, BestRound, FirstRank, Parts, run_rounds
from penstock.training.frameworks.boosted.table import ShardTable, Task
from penstock.training.job import TrainJob
from penstock.training.loop.event_sender import MailboxClient
from penstock.training.on_ray.start import RankResult, start_rank
from penstock.training.on_ray.worker import check_best_is_validated
from penstock.training.open_feeds import open_job_feed
from penstock.training.ranks import Group

__all__ = ["run_boosted_rank"]

READ_BYTES = 16 << 20
"""Bytes of features in a batch of one rank, about."""

_LISTED = 400
"""Characters of a list of classes in a message."""


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
    schema = job.manifest.feed_schema
    params = {name: value for name, value in job.spec.params.items() if name != PATIENCE}
    task = Task(schema, params, job.seed, max(1, int(job.spec.cpus_per_worker)))
    validates = bool(job.manifest.rows.get("validation"))
    check_best_is_validated(job, validates)
    for split in ("train", "validation"):
        if 0 < (rows := job.manifest.rows.get(split, 0)) < group.world_size:
            raise SpecError(
                f"the {split} split holds {counted(rows, 'row')}, and each of {group.world_size} workers needs one",
                next_step=f"set train.workers to {rows}, or give the data more {split} rows",
            )
    train = _shard(job, task, "train", group)
    validation = _shard(job, task, "validation", group) if validates else None
    metrics = validation_metrics(job.spec.checkpoint.best, schema, BoostedPredicts())
    begun, content, best_round = group.together(lambda: _read(job, library, task, start.checkpoint))
    before = begun.rounds if begun is not None else 0
    if begun is not None and begun.classes is None and schema.classes and start.checkpoint is None and group.is_first:
        print(
            f"the trees of {job.spec.start_from} do not name their classes: taken to be {shorten([*schema.classes], _LISTED)}"
        )
    with ExitStack() as closes:
        first = None
        if group.is_first:
            first = FirstRank(job, *start.first_rank(closes, client), start.facts, library.model_files[0], before)
        joined = library.joined(group, ray.util.get_node_ip_address()) if group.world_size > 1 else nullcontext({})
        network = closes.enter_context(joined)
        trees = library.trees(task, train, validation, content, network)
        if begun is not None and (now := library.forest(trees.content(before)).objective) != begun.objective:
            raise _unfit(job, f"were grown for {begun.objective[0]}, not for {now[0]}")
        parts = Parts(job, group, trees, train, validation, metrics, first, before)
        status, end = run_rounds(parts, start.state, best_round)
        written = first.finish() if first is not None else None
    return replace(start.result, status=status, state=end, checkpoint=written or start.result.checkpoint)


def _read(
    job: TrainJob, library: Library, task: Task, checkpoint: Checkpoint | None
) -> tuple[Forest | None, bytes | None, BestRound]:
    """Read the trees of `train.start_from`, those to continue from, and the best round so far."""
    content = job.run_storage.read_bytes(START) if job.spec.start_from is not None else None
    begun = _fitting(job, library, task, content) if content is not None else None
    if checkpoint is None:
        return begun, content, BestRound()
    files = checkpoint.storage
    return begun, files.read_bytes(library.model_files[0]), BestRound.model_validate_json(files.read_bytes(BEST_ROUND))


def _fitting(job: TrainJob, library: Library, task: Task, content: bytes) -> Forest:
    """Load the trees of `train.start_from`. Raises SpecError if they do not fit the rows."""
    with library.reraising():
        forest = library.forest(content)
    theirs, ours = forest.classes, task.schema.classes
    if theirs is not None and theirs != ours:
        found = "not named" if ours is None else shorten([*ours], _LISTED)
        raise _unfit(job, f"have the classes {shorten([*theirs], _LISTED)}, and those of the label are {found}")
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


def _shard(job: TrainJob, task: Task, split: Split, group: Group) -> ShardTable:
    """Open this rank's rows as they are stored, or as drawn; trees do not depend on the order."""
    row_bytes = 4 * len(task.table.names)
    rows = max(1024, READ_BYTES // row_bytes) * group.world_size
    order = job.order if job.order.is_drawn else make_order(ShuffleSpec(mode="none"), job.manifest.rows["train"])
    spec = job.spec.model_copy(update={"batch_rows": rows, "last_batch": "keep"})
    feed = open_job_feed(replace(job, order=order, spec=spec), split, group.rank, group.world_size, group.device)
    return ShardTable(task.table, feed)
