"""What does one training worker do from its first line to its last?

Set up, continue from the newest checkpoint, run the loop, report.
"""

from __future__ import annotations

import math
import os
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import ray
import ray.train
import ray.train.torch
import torch

from penstock.errors import PenstockError, SpecError
from training.checkpoint import Checkpoint, CheckpointFacts, CheckpointStore, Snapshot
from training.checkpoint_writer import CheckpointWriter
from training.exactness import BIT_EXACT, check_identity, environment_of, judge
from training.feeds import open_job_feed
from training.group import Group
from training.job import TrainJob
from training.journal import JournalWriter, truncate_journal
from training.learner import Learner
from training.loop import Observer, Parts, run_loop
from training.mailbox import Courier, Failure, MailboxClient, RayMailboxClient, Resumed, now_ms
from training.metrics import make_metrics
from training.recipe import load_recipe
from training.reporting import Reporter, RowRecorder
from training.state import TrainState, capture_rng, restore_rng, seed_rng

__all__ = ["RankResult", "run_rank", "train_loop_per_worker"]


@dataclass(frozen=True)
class RankResult:
    """How a worker group's work ended; the same on every rank but for `checkpoint`, which rank 0 knows."""

    status: str
    state: TrainState
    exactness: str
    resumed_from_step: int | None
    checkpoint: str | None


def train_loop_per_worker(config: dict[str, Any]) -> RankResult:
    """Entry point of Ray Train on every rank.

    Args:
        config: `job` (TrainJob) and `mailbox` (handle of training.mailbox.Mailbox).
    """
    job, mailbox = config["job"], config["mailbox"]
    device = ray.train.torch.get_device()
    group = Group.current(device)
    worker = ray.get_runtime_context().current_actor
    greeting = ray.get(mailbox.start.remote(group.rank, socket.gethostname(), os.getpid(), worker))
    client = RayMailboxClient(mailbox)
    try:
        return run_rank(job, group, client, stop=greeting["stop"])
    except BaseException as error:
        client.put([_failure(group.rank, error)])
        raise


def run_rank(job: TrainJob, group: Group, client: MailboxClient, *, stop: bool = False) -> RankResult:
    """Train as one rank of `group`. A collective.

    Args:
        job: what to train.
        group: the ranks.
        client: how rank 0 reaches the driver.
        stop: a stop was requested before this worker started.
    """
    _make_deterministic(job.spec.cpus_per_worker)
    feed = open_job_feed(job, "train", group.rank, group.world_size)
    validation = open_job_feed(job, "validation", group.rank, group.world_size) if job.manifest.rows.get("validation") else None
    # Weights start the same on every rank and for every number of ranks; what is drawn while training differs per rank.
    seed_rng(job.seed)
    recipe = load_recipe(job.code, job.spec.params)
    learner = Learner(recipe, recipe.build_model(feed.schema), job.spec, group)
    metrics = make_metrics(None, feed.schema, recipe).to(group.device)
    seed_rng(job.seed, group.rank)

    store = CheckpointStore(job.run_storage, job.spec.checkpoint.keep, job.spec.checkpoint.best)
    _check_best(job, [f"val/{name}" for name in ("loss", *metrics.metrics)] if validation is not None else [])
    environment = environment_of(group.device)
    checkpoint, warnings = _agree_on_checkpoint(store, group)
    exactness, state = BIT_EXACT, TrainState()
    if checkpoint is not None:
        check_identity(checkpoint.manifest, job.identity, checkpoint.name)
        exactness = judge(checkpoint.manifest, group.world_size, job.settings, environment)
        state = checkpoint.state
        learner.restore(checkpoint.model(), checkpoint.training())
        if checkpoint.manifest.world_size == group.world_size:
            restore_rng(checkpoint.ranks()[group.rank], group.device)

    facts = CheckpointFacts(
        step=state.step,
        epoch=state.epoch,
        position=state.position,
        world_size=group.world_size,
        identity=job.identity,
        settings=job.settings,
        environment=environment,
        exactness=exactness,
    )
    resumed_from = checkpoint.manifest.step if checkpoint is not None else None
    if stop:
        return RankResult("interrupted", state, exactness, resumed_from, checkpoint.name if checkpoint else None)

    with _rows_file(job, group.rank) as rows_file:
        if not group.is_first:
            observer = RowRecorder(rows_file) if rows_file else Observer()

            def help_save(state: TrainState, measured: dict[str, float]) -> None:
                group.gather(capture_rng(group.device))

            end = run_loop(Parts(job, group, recipe, learner, feed, validation, metrics, help_save, observer), state)
            return RankResult(end.status, end.state, exactness, resumed_from, None)

        truncate_journal(job.run_storage, state.step)
        courier = Courier(client)
        if checkpoint is not None:
            courier.post(Resumed(step=state.step, checkpoint=checkpoint.name, exactness=exactness, warnings=tuple(warnings)))
        writer = CheckpointWriter(store, JournalWriter(job.run_storage, job.attempt), courier.post)
        reporter = Reporter(
            courier, writer, every_s=job.spec.checkpoint.every_s, total_steps=job.total_steps, rows_file=rows_file
        )

        def save(state: TrainState, measured: dict[str, float]) -> None:
            ranks = group.gather(capture_rng(group.device))
            weights, training = learner.snapshot()
            update = {
                "step": state.step,
                "epoch": state.epoch,
                "position": state.position,
                "metrics": {name: value if math.isfinite(value) else None for name, value in measured.items()},
            }
            snapshot = Snapshot(facts.model_copy(update=update), weights, training, ranks)
            writer.submit(snapshot, reporter.take_unsealed())

        try:
            end = run_loop(Parts(job, group, recipe, learner, feed, validation, metrics, save, reporter), state)
            last = writer.wait() or checkpoint
        finally:
            writer.close()
            courier.close()
    return RankResult(end.status, end.state, exactness, resumed_from, last.name if last else None)


def _make_deterministic(cpus: float) -> None:
    """Ask every library for the same result every time; the number of threads decides how sums on a CPU are cut."""
    torch.set_num_threads(max(1, int(cpus)))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def _check_best(job: TrainJob, measured: list[str]) -> None:
    best = job.spec.checkpoint.best
    if best is not None and best.metric not in measured:
        raise SpecError(
            f"train.checkpoint.best.metric is {best.metric!r}, which validation does not measure",
            next_step=f"choose one of {measured}" if measured else "give the data a validation split: data.validation",
        )


def _agree_on_checkpoint(store: CheckpointStore, group: Group) -> tuple[Checkpoint | None, list[str]]:
    """Rank 0 finds the newest checkpoint that can be trusted; the others take its word, for they may see the storage later."""
    found: tuple[Checkpoint | None, list[str]] | PenstockError = (None, [])
    if group.is_first:
        try:
            found = store.newest_valid()
            store.clean(found[0])
        except PenstockError as error:
            found = error
    found = group.from_first(found)
    if isinstance(found, PenstockError):
        raise found
    return found


@contextmanager
def _rows_file(job: TrainJob, rank: int) -> Iterator[IO[str] | None]:
    if not job.record_rows:
        yield None
        return
    path: Path = job.run_storage.local_path(f"rows/{job.attempt}-{rank}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        yield file


def _failure(rank: int, error: BaseException) -> Failure:
    final = isinstance(error, PenstockError)
    text = "".join(traceback.format_exception(error)[-12:])
    return Failure(rank=rank, t_ms=now_ms(), final=final, text=text, error=error if final else None)  # type: ignore[arg-type]
