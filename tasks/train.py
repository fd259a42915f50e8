"""The train stage: the framework turns the cached dataset into weights, and every metric point goes to the tracker."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.errors import CheckpointError, Interrupted, PenstockError, ServiceError
from penstock.ingest.shuffle.lanes import lanes_of
from penstock.installed import ENVIRONMENT, describe_environment
from penstock.messages import counted, describe_error, did_you_mean
from penstock.storage import Storage
from penstock.tasks.context import Outcome, RunContext
from penstock.tasks.overlap import StopOrSettle
from penstock.tasks.prepare import feed_opener
from penstock.tasks.project import Project
from penstock.tasks.records.keys import framework_versions
from penstock.tasks.records.ledger import NodeFetches
from penstock.tasks.stage import Facts, Stage, VerifyContext
from penstock.training.checkpoint.exactness import check_identity
from penstock.training.checkpoint.folder import FOLDER
from penstock.training.checkpoint.manifest import Checkpoint
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.events import (
    CheckpointCommitted,
    Event,
    Handlers,
    Notice,
    Point,
    Printed,
    Reported,
    Resumed,
    ShardsFetched,
    Shown,
    TrainProgress,
    Warned,
    WorkersLost,
    WorkerStarted,
    publish,
)
from penstock.training.job import TrainJob, TrainOutcome
from penstock.training.model import ModelSpec
from penstock.training.own_values import mlflow_warning
from penstock.training.spec import BestSpec

__all__ = [
    "STAGE",
    "best_warning",
    "chosen_checkpoint",
    "make_job",
    "model_spec",
    "newest_shown",
    "other_weights",
    "trusted_checkpoint",
]

_TEXTS = (".json", ".txt", ".yaml", ".yml")
"""Files of a folder of a checkpoint that may hold secrets, such as an address."""

SHOWN_BYTES = 4 << 20
"""Largest folder of a function whose files are copied to the tracked run."""


def make_job(ctx: RunContext) -> TrainJob:
    """Collect what reading rows and training on them needs; `evaluate` uses it, too."""
    spec = ctx.project.spec
    return TrainJob(
        run_storage=ctx.work_storage,
        data_storage=ctx.storage,
        manifest=ctx.manifest,
        order=ctx.order,
        spec=spec.train,
        seed=spec.shuffle.seed,
        code=ctx.project.recipe,
        attempt=ctx.attempt.number,
        pipeline=spec.name,
        identity={
            "data": ctx.manifest.split_digests["train"],
            "order": ctx.output("shuffle")["fingerprint"],
            "batch_rows": str(spec.train.batch_rows),
        },
        open_feeds=feed_opener(ctx),
        callbacks=ctx.project.callbacks,
        data_config=ctx.project.data_config,
    )


def model_spec(ctx: RunContext) -> ModelSpec:
    """Collect what rebuilds the trained model, besides its files."""
    project = ctx.project
    return ModelSpec(
        code=project.recipe,
        params=project.spec.train.params,
        feed_schema=ctx.manifest.feed_schema,
        loader=project.framework.loader,
        requires=framework_versions(project),
        batch_rows=project.spec.train.batch_rows,
    )


def _run(ctx: RunContext) -> tuple[dict[str, Any], Outcome]:
    own_cluster = ctx.need_ray()
    ctx.work_storage.write_bytes(ENVIRONMENT, describe_environment().encode())
    before = next((a.workers for a in reversed(ctx.ledger.attempts(ctx.run.run)) if a.workers), {})
    hosts = {rank: before[rank].rpartition(":")[0] for rank in sorted(before)}
    job = replace(make_job(ctx), hosts=tuple(hosts.values()))
    if (warning := mlflow_warning(job.code.versions)) is not None:
        ctx.warn(f"train: {warning}")
    store = CheckpointStore(ctx.work_storage, ctx.project.spec.train.checkpoint)
    committed = store.committed()
    if committed:
        check_identity(committed[0].manifest, job.identity, committed[0].name)
    ctx.tracker.checkpoints(committed)
    if not committed and ctx.ledger.has_trained(ctx.run.run):
        ctx.reporter.report("train: this run has no checkpoint left; it starts at step 0 again")

    if not committed and (start := ctx.project.start_from) is not None:
        start.store(ctx.work_storage)
        if start.name != job.spec.start_from:
            ctx.reporter.report(f"train: train.start_from is {start.name}")

    handlers = _handlers(ctx, store, hosts)

    def listen(events: Sequence[Event]) -> None:
        if ctx.stopping.lost is not None:
            raise ctx.stopping.lost
        points = [event for event in events if isinstance(event, Point)]
        if points:
            ctx.tracker.points(points)
            ctx.on_points(points)
        publish(events, handlers)

    stop = ctx.stopping.stop if ctx.overlapped is None else StopOrSettle(ctx)
    ctx.stopping.graceful = True
    try:
        with ctx.tracker.charting_machine():
            outcome = ctx.project.framework.train(job, stop=stop, listener=listen, own_cluster=own_cluster)
    except BaseException:
        if ctx.stopping.lost is not None:
            raise
        with contextlib.suppress(OSError, PenstockError):  # why training ended is the news
            committed = store.committed()
            ctx.tracker.checkpoints(committed)
            if committed:
                ctx.attempt = ctx.attempt.model_copy(update={"exactness": committed[0].manifest.exactness})
        raise
    finally:
        ctx.stopping.graceful = False
    ctx.tracker.checkpoints(store.committed())
    ctx.attempt = ctx.attempt.model_copy(
        update={"exactness": outcome.exactness, "resumed_from_step": outcome.resumed_from_step}
    )
    _check_ended_well(ctx, outcome)
    if job.spec.checkpoint.keep == 0 and outcome.checkpoint in store.superfluous(ended=True):
        outcome = outcome.model_copy(update={"checkpoint": chosen_checkpoint(outcome)})  # `_publish` deletes the other
    if job.spec.loop is not None:
        _show_folders(ctx, store, {"last": outcome.checkpoint, "best": outcome.best_checkpoint})
    if warning := best_warning(job.spec.checkpoint.best, outcome):
        ctx.warn(f"train: {warning}")
    resumed = outcome.resumed_from_step is not None
    return outcome.model_dump(mode="json"), "resumed" if resumed else "ran"


def _publish(ctx: RunContext, output: dict[str, Any]) -> None:
    """Delete with `keep: 0` what a continued training needs, now that the end is recorded, unless another attempt goes on."""
    if ctx.project.spec.train.checkpoint.keep > 0 or ctx.stopping.lost is not None:
        return
    store = CheckpointStore(ctx.work_storage, ctx.project.spec.train.checkpoint)
    newest, writer = next(iter(store.committed()), None), store.newest_writer()
    is_end = newest is not None and newest.manifest.step <= TrainOutcome.model_validate(output).step
    if is_end and (writer is None or writer.attempt <= ctx.attempt.number) and store.prune(ended=True):
        ctx.tracker.checkpoints(store.committed())


def _show_folders(ctx: RunContext, store: CheckpointStore, names: Mapping[str, str | None]) -> None:
    """Show what a function reported last and best: the files where they are small, else the address of their folder."""
    for which, checkpoint in ((which, store.get(name)) for which, name in names.items() if name is not None):
        files = {name: file for name, file in checkpoint.manifest.files.items() if name.startswith(f"{FOLDER}/")}
        if sum(file.size_bytes for file in files.values()) > SHOWN_BYTES:
            ctx.tracker.log_text(f"checkpoint/{which}.txt", f"{checkpoint.storage.uri(FOLDER)}\n")
            continue
        for name in files:
            shown, content = name.replace(FOLDER, f"checkpoint/{which}", 1), checkpoint.storage.read_bytes(name)
            if name.lower().endswith(_TEXTS):
                ctx.tracker.log_text(shown, content.decode(errors="replace"))  # which hides secrets
            else:
                ctx.tracker.log_figure(shown, content)


def _handlers(ctx: RunContext, store: CheckpointStore, hosts: dict[int, str]) -> Handlers:
    """Subscribe the ledger, the tracker and the terminal to what training publishes. Points go to the tracker in one call.

    Args:
        hosts: by rank, of the worker group before; changed here.
    """
    report, progress = ctx.reporter.report, ctx.reporter.progress("train")

    saved = ctx.attempt.fetched

    def save_attempt(**changes: Any) -> None:
        ctx.attempt = ctx.attempt.model_copy(update=changes)
        ctx.ledger.save_attempt(ctx.run.run, ctx.attempt)

    fetches: dict[tuple[int, str, int], ShardsFetched] = {}

    def fetched(event: ShardsFetched) -> None:
        fetches[event.rank, event.host, event.pid] = event  # of each process the newest
        by_node: dict[str, NodeFetches] = {}
        for each in fetches.values():
            node = by_node.get(each.host, NodeFetches())
            by_node[each.host] = NodeFetches(bytes=node.bytes + each.bytes, wait_s=round(node.wait_s + each.wait_s, 3))
        ctx.attempt = ctx.attempt.model_copy(update={"fetched": by_node})

    def committed(_: CheckpointCommitted) -> None:
        nonlocal saved
        if ctx.attempt.fetched != saved:  # not at each event: a large cluster has many
            saved = ctx.attempt.fetched
            save_attempt()
        ctx.tracker.checkpoints(store.committed())

    def resumed(event: Resumed) -> None:
        for warning in event.warnings:
            ctx.warn(f"train: {warning}")
        report(f"train: continues from step {event.step} ({event.exactness})")
        save_attempt(exactness=event.exactness, resumed_from_step=event.step)

    def started(event: WorkerStarted) -> None:
        before, hosts[event.rank] = hosts.get(event.rank, event.host), event.host
        if before != event.host and ctx.order.version == 2 and not ctx.project.storage.is_local:
            lanes = lanes_of(event.rank, ctx.project.spec.train.workers, ctx.order.lanes)
            shards = ctx.manifest.opened(ctx.storage).shards_of("train")
            own = shards.size_bytes[ctx.order.of_shards(shards.rows).lane_rows.shards_of(*lanes)]
            share = f"{counted(len(own), 'shard')} of its lanes ({own.sum() / 1e6:,.1f} MB)"
            moved = f"rank {event.rank} moves from {before} to {event.host}"
            report(f"train: {moved}, which fetches the {share} unless it has them")
        save_attempt(workers={**ctx.attempt.workers, event.rank: f"{event.host}:{event.pid}"})

    def lost(event: WorkersLost) -> None:
        if not ctx.stopping.stop.is_set():  # then it was ended from here
            restart = f"restart {event.restart} of {ctx.project.spec.train.retries}"
            ctx.warn(f"train: a worker was lost: {event.who}; all are started again ({restart})")

    def printed(event: Printed) -> None:
        for line in event.lines:
            report(f"train: rank {event.rank}: {line}")

    on_report = [ctx.on_report] if ctx.on_report is not None else []

    def reported(event: Reported) -> None:
        for rank, values in enumerate(event.ranks):
            try:
                for call in on_report:
                    call({"rank": rank, "step": event.step, **values})
            except Exception as error:  # the user's code, and training goes on
                on_report.clear()
                ctx.warn(f"on_report failed and is not called again: {describe_error(error)}")

    def show(event: Shown) -> None:
        if event.name.endswith(".txt"):
            ctx.tracker.log_text(event.name, event.content.decode())
        else:
            ctx.tracker.log_figure(event.name, event.content)

    newest: dict[str, float] = {}

    def progressed(event: TrainProgress) -> None:
        measured = "".join(f", {name} {value:.4g}" for name, value in newest_shown(newest))
        progress(event.step, event.total_steps, "steps", f"epoch {event.epoch + 1}{measured}, {event.rows_per_s:,.0f} rows/s")

    return {
        CheckpointCommitted: committed,
        Resumed: resumed,
        WorkerStarted: started,
        WorkersLost: lost,
        Notice: lambda event: report(f"train: {event.message}"),
        Printed: printed,
        ShardsFetched: fetched,
        Reported: reported,
        Shown: show,
        Warned: lambda event: ctx.warn(f"train: {event.message}"),
        Point: lambda event: newest.update(event.values),
        TrainProgress: progressed,
    }


def newest_shown(newest: Mapping[str, float]) -> list[tuple[str, float]]:
    """Choose what the terminal shows of the newest values: the losses, the learning rate, two metrics of validation.

    A loop names its values itself: its first four are shown.
    """
    first = [name for name in ("train/loss", "train/lr", "val/loss") if name in newest]
    rest = [name for name in newest if name.startswith("val/") and name not in first][:2]
    own = [name for name in newest if "/" not in name][:4]
    return [(name.removeprefix("train/"), newest[name]) for name in [*first, *rest, *own]]


def best_warning(best: BestSpec | None, outcome: TrainOutcome) -> str:
    """Explain that no checkpoint was the best one, since none has the metric; empty if one was, or none is asked for."""
    if best is None or outcome.best_checkpoint is not None:
        return ""
    meant = did_you_mean(best.metric, outcome.metrics)
    return (
        f"train.checkpoint.best: no checkpoint has {best.metric!r}{meant}, so the newest is evaluated and registered; it has "
        f"{', '.join(sorted(outcome.metrics)) or 'no metric'}"
    )


def _check_ended_well(ctx: RunContext, outcome: TrainOutcome) -> None:
    """Raise unless training came to its end and its weights are there: what is returned is recorded as done."""
    if outcome.status == "interrupted":
        saved = f"{outcome.checkpoint} is saved" if outcome.checkpoint else "there was nothing to save yet"
        if ctx.stopping.stop.is_set():
            raise Interrupted(ctx.stopping.signum, f"stopped at step {outcome.step}; {saved}")
        # The stage is tried again after a ServiceError.
        raise ServiceError(
            f"training stopped at step {outcome.step} although nothing asked for it: its workers lost the driver; {saved}",
            next_step="run the same command again; it continues from the newest checkpoint",
        )
    if outcome.checkpoint is None:
        raise CheckpointError(
            f"training came to its end, and {ctx.work_storage.uri('checkpoints')} holds no checkpoint of it: its workers wrote "
            "elsewhere, or what they wrote was deleted",
            next_step="point `storage` to s3:// or to a folder that every node mounts, and delete nothing in it while a run "
            "lasts; then run the same command: it trains again",
        )


def chosen_checkpoint(outcome: TrainOutcome) -> str:
    """Name the checkpoint that is evaluated and registered: the best where the spec names a metric, else the newest.

    A recorded outcome always has a checkpoint.
    """
    name = outcome.best_checkpoint or outcome.checkpoint
    assert name is not None
    return name


def trusted_checkpoint(project: Project, run_storage: Storage, name: str) -> Checkpoint:
    """Return the checkpoint if its files match their hashes: the trained weights are evaluated and registered.

    Raises:
        CheckpointError: it is gone or damaged.
    """
    store = CheckpointStore(run_storage, project.spec.train.checkpoint)
    problem = store.problem(name)
    if problem is not None:
        raise CheckpointError(
            f"checkpoint {run_storage.uri(f'checkpoints/{name}')} cannot be used: {problem}",
            next_step="restore its files, or train again: penstock run FILE --fresh",
        )
    return store.get(name)


def other_weights(context: VerifyContext, output: dict[str, Any]) -> str | None:
    """Explain why an output made from a checkpoint is not of the weights that training ends with now; None if it is."""
    now, then = context.upstream.get("train", {}).get("weights_digest"), output["weights_digest"]
    return f"it is of weights {then}, and training now ends with {now}" if now not in (None, then) else None


def _verify(context: VerifyContext, output: dict[str, Any]) -> str | None:
    outcome = TrainOutcome.model_validate(output)
    store = CheckpointStore(context.run_storage, context.project.spec.train.checkpoint)
    name = outcome.best_checkpoint or outcome.checkpoint
    if name is None:
        return "it names no checkpoint"
    problem = store.problem(name, deep=context.deep)
    return f"checkpoint {name}: {problem}" if problem is not None else None


def _facts(output: dict[str, Any]) -> Facts:
    outcome = TrainOutcome.model_validate(output)
    shown = {name: value for name, value in outcome.metrics.items() if name.startswith(("val/", "train/loss"))}
    model = f", model of step {outcome.model_step:,}" if outcome.model_step != outcome.step else ""
    return (
        ("steps", f"{outcome.step:,}{model}"),
        *((name, f"{value:.4g}") for name, value in sorted(shown.items())),
        ("exactness", outcome.exactness),
        ("checkpoint", chosen_checkpoint(outcome)),
        ("weights digest", outcome.weights_digest),
    )


STAGE = Stage("train", _run, _facts, _verify, of_run=True, publish=_publish)
